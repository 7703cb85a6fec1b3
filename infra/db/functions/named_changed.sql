-- Logs a change of a small table. Readers read such a table completely.
create or replace function named_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values (tg_table_name, '');
    return null;
end $$;
