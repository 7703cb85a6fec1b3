create or replace function workload_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key)
    values (case when (new.submitted_at, new.paused_s) = (old.submitted_at, old.paused_s) then 'workload' else 'moved' end, new.id);
    return null;
end $$;
