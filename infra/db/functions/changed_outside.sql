create or replace function changed_outside() returns trigger language plpgsql as $$
begin
    perform nextval('outside_change');
    return null;
end $$;
