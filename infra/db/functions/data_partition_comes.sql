-- The lock puts appends to a table in one order with each other and with changes of its home: times follow commits.
create or replace function data_partition_comes() returns trigger language plpgsql as $$
begin
    perform from data_table where name = new.data_table for no key update;
    new.created_at := clock_timestamp();
    return new;
end $$;
