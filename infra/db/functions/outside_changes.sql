-- Counts changes by users that affect decisions about evictions.
create function count_outside_change() returns trigger language plpgsql as $$
begin
    perform nextval('outside_change');
    return null;
end $$;
-- The first placement of an element of an array inserts a row, but is no change from outside.
create function count_submissions() returns trigger language plpgsql as $$
begin
    if exists (select from inserted where array_id is null) then
        perform nextval('outside_change');
    end if;
    return null;
end $$;
create trigger workload_submitted after insert on workload referencing new table as inserted
    for each statement execute function count_submissions();
create trigger workload_ended after update of finished_at on workload for each row
    when (old.finished_at is distinct from new.finished_at) execute function count_outside_change();
create trigger workload_has_another_level after update of level on workload for each row
    when (old.level is distinct from new.level) execute function count_outside_change();
create trigger tenant_has_another_quota after update of level, quota_gpus, quota_cpus_milli on tenant for each row
    when ((old.level, old.quota_gpus, old.quota_cpus_milli) is distinct from
          (new.level, new.quota_gpus, new.quota_cpus_milli))
    execute function count_outside_change();
