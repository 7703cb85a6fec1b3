-- The change log: the changed rows that scheduling decisions depend on. Other changes are not logged.
-- The table is unlogged and need not be crash-safe: a crash also empties `change_epoch`, and readers without an epoch
-- read everything (`infra.db.changes`).
--
-- Inserts and deletes affect many rows per statement, and updates affect one. So the triggers for the former are per
-- statement, and those for updates are per row, with conditions that skip changes no decision depends on.
create function log_inserts() returns trigger language plpgsql as $$
begin
    case tg_table_name
        when 'workload' then
            -- Elements that runners lease are not in the queue, and their attempts hold nothing.
            insert into change (kind, key) select 'workload', id from inserted where runner is null;
        when 'attempt' then
            insert into change (kind, key, attempt, region) select 'attempt', workload, attempt, region from inserted
            where released_at is null or cpus_milli > 0 or gpu_types <> '{}';
        when 'machine' then
            insert into change (kind, key, region) select 'machine', id, region from inserted;
    end case;
    return null;
end $$;
create trigger workload_inserted after insert on workload referencing new table as inserted
    for each statement execute function log_inserts();
create trigger attempt_inserted after insert on attempt referencing new table as inserted
    for each statement execute function log_inserts();
create trigger machine_inserted after insert on machine referencing new table as inserted
    for each statement execute function log_inserts();

-- Logs deleted rows. A released attempt only counts in its tenant's usage window, which is then summed up again.
create function log_deletes() returns trigger language plpgsql as $$
begin
    case tg_table_name
        when 'workload' then
            insert into change (kind, key) select 'moved', id from deleted;
        when 'attempt' then
            insert into change (kind, key, attempt, region)
            select case when released_at is null then 'attempt' else 'history' end, workload, attempt, region
            from deleted;
        when 'allocation' then
            insert into change (kind, key, attempt)
            select distinct 'attempt', workload, attempt from deleted where released_at is null;
        when 'machine' then
            insert into change (kind, key, region) select 'machine', id, region from deleted;
    end case;
    return null;
end $$;
create trigger workload_deleted after delete on workload referencing old table as deleted
    for each statement execute function log_deletes();
create trigger attempt_deleted after delete on attempt referencing old table as deleted
    for each statement execute function log_deletes();
create trigger allocation_deleted after delete on allocation referencing old table as deleted
    for each statement execute function log_deletes();
create trigger machine_deleted after delete on machine referencing old table as deleted
    for each statement execute function log_deletes();

-- Logs that readers must read everything again.
create function log_truncate() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values ('everything', '');
    return null;
end $$;
create trigger workload_truncated after truncate on workload for each statement execute function log_truncate();
create trigger attempt_truncated after truncate on attempt for each statement execute function log_truncate();
create trigger allocation_truncated after truncate on allocation for each statement execute function log_truncate();
create trigger machine_truncated after truncate on machine for each statement execute function log_truncate();
create trigger tenant_truncated after truncate on tenant for each statement execute function log_truncate();
create trigger region_truncated after truncate on region for each statement execute function log_truncate();

-- Logs a change of a small table. Readers read such a table completely.
create function log_table_change() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values (tg_table_name, '');
    return null;
end $$;
create trigger tenant_changed after insert or update or delete on tenant
    for each statement execute function log_table_change();
create trigger region_changed after insert or update or delete on region
    for each statement execute function log_table_change();

create function log_workload_change() returns trigger language plpgsql as $$
begin
    insert into change (kind, key)
    values (
        -- Schedulers have no row of a blocked workload that could move.
        case when (new.submitted_at, new.paused_s) = (old.submitted_at, old.paused_s) or old.blocked is not null
            then 'workload' else 'moved' end,
        new.id);
    return null;
end $$;
create trigger workload_changed after update on workload for each row when (
    new.runner is null and (new.tenant, new.level, new.held_by is null, new.submitted_at, new.ask,
     new.phase in ('pending', 'preempted') and new.finished_at is null, new.paused_s, new.blocked is null)
    is distinct from
    (old.tenant, old.level, old.held_by is null, old.submitted_at, old.ask,
     old.phase in ('pending', 'preempted') and old.finished_at is null, old.paused_s, old.blocked is null))
    execute function log_workload_change();

create function log_attempt_change() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, attempt, region)
    values (case when old.released_at is null then 'attempt' else 'history' end, new.workload, new.attempt,
            case when new.region = old.region then new.region end);
    return null;
end $$;
create trigger attempt_changed after update on attempt for each row when (
    (new.region, new.awarded_at, new.released_at, new.gpu_types, new.cpus_milli)
    is distinct from
    (old.region, old.awarded_at, old.released_at, old.gpu_types, old.cpus_milli)
    or new.released_at is null
       and (new.rank, new.started_at, new.ready_at is null, new.evicting_since is null, new.checkpoint_at,
            new.resumed_step is null, new.cold_start_s)
           is distinct from
           (old.rank, old.started_at, old.ready_at is null, old.evicting_since is null, old.checkpoint_at,
            old.resumed_step is null, old.cold_start_s))
    execute function log_attempt_change();

create function log_allocation_change() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, attempt) values ('attempt', new.workload, new.attempt);
    return null;
end $$;
create trigger allocation_changed after update on allocation for each row when (
    (new.slots, new.cpus_milli - new.awaited_cpus_milli, new.memory_bytes - new.awaited_memory_bytes,
     new.released_at is null)
    is distinct from
    (old.slots, old.cpus_milli - old.awaited_cpus_milli, old.memory_bytes - old.awaited_memory_bytes,
     old.released_at is null))
    execute function log_allocation_change();

create function log_machine_change() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, region) values ('machine', new.id, new.region);
    if new.region <> old.region then
        insert into change (kind, key, region) values ('machine', new.id, old.region);
    end if;
    return null;
end $$;
create trigger machine_changed after update on machine for each row when (
    (new.region, new.cluster, new.rack, new.gpu_type, new.gpus, new.cpus_milli, new.memory_bytes, new.held,
     new.free_cpus_milli, new.free_memory_bytes, new.state = 'ready', new.cordon is null, new.draining, new.withheld,
     new.pool)
    is distinct from
    (old.region, old.cluster, old.rack, old.gpu_type, old.gpus, old.cpus_milli, old.memory_bytes, old.held,
     old.free_cpus_milli, old.free_memory_bytes, old.state = 'ready', old.cordon is null, old.draining, old.withheld,
     old.pool))
    execute function log_machine_change();

-- Logs a change of a cluster. Schedulers store the cluster's attributes with each of its machines.
create function log_cluster_change() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, region)
    select 'machine', id, region from machine where region = new.region and cluster = new.name;
    return null;
end $$;
create trigger cluster_changed after update of capacity, prices, departures_per_h, zone on cluster for each row
    when ((old.capacity, old.prices, old.departures_per_h, old.zone) is distinct from
          (new.capacity, new.prices, new.departures_per_h, new.zone))
    execute function log_cluster_change();

-- Logs a change of the tenants that may use a pool. Schedulers store it with each machine of the pool.
create function log_pool_change() returns trigger language plpgsql as $$
declare
    changed pool := coalesce(new, old);
begin
    insert into change (kind, key, region)
    select 'machine', id, region from machine where region = changed.region and pool = changed.name;
    return null;
end $$;
create trigger pool_changed after update of tenants on pool for each row
    when (old.tenants is distinct from new.tenants) execute function log_pool_change();
create trigger pool_made after insert or delete on pool for each row execute function log_pool_change();
