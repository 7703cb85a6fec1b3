-- The namespace of a table: what is before the first dot of its name, or `default`.
create or replace function table_namespace(name text) returns text language sql immutable parallel safe as $$
    select case when strpos(name, '.') > 0 then split_part(name, '.', 1) else 'default' end
$$;
