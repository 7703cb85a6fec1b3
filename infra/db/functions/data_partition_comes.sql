-- The lock serialises appends to a table with each other and with changes of its home, so that the order of the times
-- is the order of the commits.
create or replace function data_partition_comes() returns trigger language plpgsql as $$
begin
    perform from data_table where name = new.data_table for no key update;
    new.created_at := clock_timestamp();
    return new;
end $$;
