create or replace function data_partitions_came() returns trigger language plpgsql as $$
begin
    update data_table as t set size_bytes = t.size_bytes + came.size_bytes
    from (select data_table, sum(size_bytes) as size_bytes from moved_rows group by data_table) as came
    where t.name = came.data_table;
    insert into replica_partition (data_table, partition, region, ready_at)
    select p.data_table, p.name, t.home_region, p.created_at
    from moved_rows as p join data_table as t on t.name = p.data_table
        join replica as r on r.data_table = t.name and r.region = t.home_region and r.state = 'ready' and r.whole;
    return null;
end $$;
