-- What a workload asks of the schedulers, as one text: equal texts are equal wishes, and most of a queue's are.
-- `domain.ask` reads it.
create function workload_ask(spec jsonb) returns text language sql immutable parallel safe as $$
    select jsonb_strip_nulls(jsonb_build_object(
        'jobs', (
            select jsonb_agg(jsonb_build_array(
                job -> 'name', job -> 'tasks', job -> 'resources' -> 'gpus', job -> 'resources' -> 'gpu_types',
                job -> 'resources' -> 'cpus_milli', job -> 'resources' -> 'memory_bytes',
                coalesce(job -> 'span_clusters', 'false')) order by place)
            from jsonb_array_elements(spec -> 'jobs') with ordinality as listed (job, place)),
        'tables', nullif(spec -> 'tables', '[]'),
        'allowed', spec -> 'regions_allowed',
        'excluded', nullif(spec -> 'regions_excluded', '[]'),
        'max_runtime_s', spec -> 'limits' -> 'max_runtime_s'))::text
$$;

alter table workload add column ask text generated always as (workload_ask(spec)) stored;

-- The change log: which rows have changed that decisions look at. Only what a decision would notice is logged.
-- It is not crash-safe, and need not be: with it a crash empties `change_epoch`, and readers without an epoch read
-- everything (`infra.db.changes`).
--
-- Rows come and go in statements of many, and change one by one: so the triggers are by statement, and by row with a
-- condition that spares all changes that no decision looks at.
create function rows_came() returns trigger language plpgsql as $$
begin
    case tg_table_name
        when 'workload' then
            insert into change (kind, key) select 'workload', id from moved_rows;
        when 'attempt' then
            insert into change (kind, key, attempt, region) select 'attempt', workload, attempt, region from moved_rows;
        when 'allocation' then
            insert into change (kind, key, attempt) select distinct 'attempt', workload, attempt from moved_rows;
        when 'machine' then
            insert into change (kind, key, region) select 'machine', id, region from moved_rows;
    end case;
    return null;
end $$;

-- An attempt that is over counts in its tenant's window of use only: where that is rewritten, it is summed up anew.
create function rows_went() returns trigger language plpgsql as $$
begin
    case tg_table_name
        when 'workload' then
            insert into change (kind, key) select 'moved', id from moved_rows;
        when 'attempt' then
            insert into change (kind, key, attempt, region)
            select case when released_at is null then 'attempt' else 'history' end, workload, attempt, region
            from moved_rows;
        when 'allocation' then
            insert into change (kind, key, attempt)
            select distinct 'attempt', workload, attempt from moved_rows where released_at is null;
        when 'machine' then
            insert into change (kind, key, region) select 'machine', id, region from moved_rows;
    end case;
    return null;
end $$;

do $$
declare
    name text;
begin
    foreach name in array array['workload', 'attempt', 'allocation', 'machine'] loop
        execute format('create trigger %1$s_came after insert on %1$s referencing new table as moved_rows'
            || ' for each statement execute function rows_came()', name);
        execute format('create trigger %1$s_went after delete on %1$s referencing old table as moved_rows'
            || ' for each statement execute function rows_went()', name);
    end loop;
end $$;

create function workload_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key)
    values (case when new.submitted_at = old.submitted_at then 'workload' else 'moved' end, new.id);
    return null;
end $$;

create trigger workload_changed after update on workload for each row when (
    (new.tenant, new.level, new.held_by is null, new.submitted_at, new.ask,
     new.phase in ('pending', 'preempted') and new.finished_at is null)
    is distinct from
    (old.tenant, old.level, old.held_by is null, old.submitted_at, old.ask,
     old.phase in ('pending', 'preempted') and old.finished_at is null))
    execute function workload_changed();

create function attempt_changed() returns trigger language plpgsql as $$
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
       and (new.rank, new.started_at, new.ready_at is null, new.evicting_since is null, new.checkpoint_at)
           is distinct from
           (old.rank, old.started_at, old.ready_at is null, old.evicting_since is null, old.checkpoint_at))
    execute function attempt_changed();

create function allocation_changed() returns trigger language plpgsql as $$
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
    execute function allocation_changed();

create function machine_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, region) values ('machine', new.id, new.region);
    if new.region <> old.region then
        insert into change (kind, key, region) values ('machine', new.id, old.region);
    end if;
    return null;
end $$;

create trigger machine_changed after update on machine for each row when (
    (new.region, new.cluster, new.rack, new.gpu_type, new.gpus, new.cpus_milli, new.memory_bytes, new.held,
     new.free_cpus_milli, new.free_memory_bytes, new.state = 'ready', new.cordon is null, new.draining)
    is distinct from
    (old.region, old.cluster, old.rack, old.gpu_type, old.gpus, old.cpus_milli, old.memory_bytes, old.held,
     old.free_cpus_milli, old.free_memory_bytes, old.state = 'ready', old.cordon is null, old.draining))
    execute function machine_changed();

-- The allocation guard for what is inserted: as for one row, for all rows of a statement at once.
create function allocation_guard_inserted() returns trigger language plpgsql as $$
declare
    refused text;
begin
    with taken as (
        select machine, bit_or(slots) as slots, bit_or(awaited) as awaited, sum(slots) as slots_sum,
               sum(awaited) as awaited_sum, sum(cpus_milli - awaited_cpus_milli) as cpus,
               sum(memory_bytes - awaited_memory_bytes) as memory
        from moved_rows where released_at is null group by machine
    ), taking as (
        update machine
        set held = held | taken.slots, promised = promised | taken.awaited,
            free_cpus_milli = free_cpus_milli - taken.cpus, free_memory_bytes = free_memory_bytes - taken.memory
        from taken
        where machine.id = taken.machine
          -- Masks that have no slot in common add up to their union.
          and taken.slots_sum = taken.slots and machine.held & taken.slots = 0
          and taken.awaited_sum = taken.awaited and machine.promised & taken.awaited = 0
        returning machine.id
    )
    select string_agg(taken.machine, ', ') into refused
    from taken where not exists (select from taking where taking.id = taken.machine);
    if refused is not null then
        raise exception 'machine %: slots or promised slots have a holder or a successor already', refused
            using errcode = 'exclusion_violation';
    end if;
    return null;
end $$;

drop trigger allocation_guard on allocation;
create trigger allocation_guard after update or delete on allocation
    for each row execute function allocation_guard();
create trigger allocation_guard_inserted after insert on allocation referencing new table as moved_rows
    for each statement execute function allocation_guard_inserted();

-- Of these there are few, and they are read whole.
create function named_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values (tg_table_name, '');
    return null;
end $$;

create trigger tenant_changed after insert or update or delete on tenant
    for each statement execute function named_changed();
create trigger region_changed after insert or update or delete on region
    for each statement execute function named_changed();

create function all_went() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values ('everything', '');
    return null;
end $$;

do $$
declare
    name text;
begin
    foreach name in array array['workload', 'attempt', 'allocation', 'machine', 'tenant', 'region'] loop
        execute format(
            'create trigger %1$s_emptied after truncate on %1$s for each statement execute function all_went()', name);
    end loop;
end $$;
