-- Of these there are few, and they are read whole.
create or replace function named_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values (tg_table_name, '');
    return null;
end $$;
