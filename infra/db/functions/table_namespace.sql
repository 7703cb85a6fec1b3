-- What the database keeps of the catalogue, whoever writes it: a table has one home, whose replica is whole, ready and
-- has every partition; a partition never changes, and goes only with its table.
create or replace function table_namespace(name text) returns text language sql immutable parallel safe as $$
    select case when strpos(name, '.') > 0 then split_part(name, '.', 1) else 'default' end
$$;
