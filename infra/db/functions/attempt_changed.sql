create or replace function attempt_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, attempt, region)
    values (case when old.released_at is null then 'attempt' else 'history' end, new.workload, new.attempt,
            case when new.region = old.region then new.region end);
    return null;
end $$;
