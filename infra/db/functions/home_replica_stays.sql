-- Only the replica in the table's home is checked; other replicas may change freely. The home is read first, because
-- this runs for each row when a whole replica is deleted.
create or replace function home_replica_stays() returns trigger language plpgsql as $$
begin
    perform from data_table where name = old.data_table and home_region = old.region for share;
    if found then
        perform check_home(old.data_table);
    end if;
    return null;
end $$;
