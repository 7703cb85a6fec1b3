create or replace function machine_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, region) values ('machine', new.id, new.region);
    if new.region <> old.region then
        insert into change (kind, key, region) values ('machine', new.id, old.region);
    end if;
    return null;
end $$;
