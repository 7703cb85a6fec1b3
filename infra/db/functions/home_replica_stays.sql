-- Of a replica that is not the home's anything may change: looked at first, since a whole replica goes row by row.
create or replace function home_replica_stays() returns trigger language plpgsql as $$
begin
    perform from data_table where name = old.data_table and home_region = old.region for share;
    if found then
        perform check_home(old.data_table);
    end if;
    return null;
end $$;
