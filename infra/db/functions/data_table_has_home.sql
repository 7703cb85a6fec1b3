create or replace function data_table_has_home() returns trigger language plpgsql as $$
begin
    perform check_home(new.name);
    return null;
end $$;
