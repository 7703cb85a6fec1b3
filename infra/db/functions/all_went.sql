create or replace function all_went() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values ('everything', '');
    return null;
end $$;
