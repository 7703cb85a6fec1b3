create or replace function allocation_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, attempt) values ('attempt', new.workload, new.attempt);
    return null;
end $$;
