-- Returns the namespace of a table: the part of its name before the first dot, or `default`.
create or replace function table_namespace(name text) returns text language sql immutable parallel safe as $$
    select case when strpos(name, '.') > 0 then split_part(name, '.', 1) else 'default' end
$$;
