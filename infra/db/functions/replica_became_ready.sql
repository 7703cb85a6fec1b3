-- A replica of a whole table that becomes ready must have every partition that the table has at that time.
create or replace function replica_became_ready() returns trigger language plpgsql as $$
begin
    perform from data_table where name = new.data_table for share;
    insert into replica_partition (data_table, partition, region, ready_at)
    select p.data_table, p.name, new.region, clock_timestamp() from data_partition as p where p.data_table = new.data_table
    on conflict (data_table, partition, region) do update set ready_at = excluded.ready_at
        where replica_partition.ready_at is null;
    return null;
end $$;
