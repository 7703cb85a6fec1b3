-- What a workload asks of the schedulers, as one text: equal texts are equal wishes, and most of a queue's are.
-- `domain.ask` reads it.
create function workload_ask(spec jsonb) returns text language sql immutable parallel safe as $$
    select jsonb_strip_nulls(jsonb_build_object(
        'jobs', (
            select jsonb_agg(jsonb_build_array(
                job -> 'name', job -> 'tasks', job -> 'resources' -> 'gpus', job -> 'resources' -> 'gpu_types',
                job -> 'resources' -> 'cpus_milli', job -> 'resources' -> 'memory_bytes') order by place)
            from jsonb_array_elements(spec -> 'jobs') with ordinality as listed (job, place)),
        'tables', nullif(spec -> 'tables', '[]'),
        'allowed', spec -> 'regions_allowed',
        'excluded', nullif(spec -> 'regions_excluded', '[]'),
        'max_runtime_s', spec -> 'limits' -> 'max_runtime_s'))::text
$$;

-- The change log: which rows have changed that decisions look at. Only what a decision would notice is logged.
-- It is not crash-safe, and need not be: with it a crash empties `change_epoch`, and readers without an epoch read
-- everything (`infra.db.changes`).
create function workload_changed() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into change (kind, key) select 'workload', id from new_rows;
    elsif tg_op = 'DELETE' then
        insert into change (kind, key) select 'moved', id from old_rows;
    else
        insert into change (kind, key)
        select case when n.submitted_at = o.submitted_at then 'workload' else 'moved' end, n.id
        from new_rows n join old_rows o on o.id = n.id
        where (n.tenant, n.level, n.held_by is null, n.submitted_at, n.ask,
               n.phase in ('pending', 'preempted') and n.finished_at is null)
            is distinct from
              (o.tenant, o.level, o.held_by is null, o.submitted_at, o.ask,
               o.phase in ('pending', 'preempted') and o.finished_at is null);
    end if;
    return null;
end $$;

-- An attempt that is over counts in its tenant's window of use only: where that is rewritten, it is summed up anew.
create function attempt_changed() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into change (kind, key, attempt, region) select 'attempt', workload, attempt, region from new_rows;
    elsif tg_op = 'DELETE' then
        insert into change (kind, key, attempt, region)
        select case when released_at is null then 'attempt' else 'history' end, workload, attempt, region from old_rows;
    else
        insert into change (kind, key, attempt, region)
        select case when o.released_at is null then 'attempt' else 'history' end, n.workload, n.attempt, n.region
        from new_rows n join old_rows o on o.workload = n.workload and o.attempt = n.attempt
        where (n.region, n.awarded_at, n.released_at, n.gpu_types, n.cpus_milli)
            is distinct from (o.region, o.awarded_at, o.released_at, o.gpu_types, o.cpus_milli)
           or n.released_at is null
              and (n.rank, n.started_at, n.ready_at is null, n.evicting_since is null, n.checkpoint_at)
            is distinct from (o.rank, o.started_at, o.ready_at is null, o.evicting_since is null, o.checkpoint_at);
    end if;
    return null;
end $$;

create function allocation_changed() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into change (kind, key, attempt) select distinct 'attempt', workload, attempt from new_rows;
    elsif tg_op = 'DELETE' then
        insert into change (kind, key, attempt)
        select distinct 'attempt', workload, attempt from old_rows where released_at is null;
    else
        insert into change (kind, key, attempt)
        select distinct 'attempt', n.workload, n.attempt
        from new_rows n
        join old_rows o on o.workload = n.workload and o.attempt = n.attempt and o.machine = n.machine
        where (n.slots, n.cpus_milli - n.awaited_cpus_milli, n.memory_bytes - n.awaited_memory_bytes,
               n.released_at is null)
            is distinct from
              (o.slots, o.cpus_milli - o.awaited_cpus_milli, o.memory_bytes - o.awaited_memory_bytes,
               o.released_at is null);
    end if;
    return null;
end $$;

create function machine_changed() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into change (kind, key, region) select 'machine', id, region from new_rows;
    elsif tg_op = 'DELETE' then
        insert into change (kind, key, region) select 'machine', id, region from old_rows;
    else
        insert into change (kind, key, region)
        select 'machine', n.id, r.region
        from new_rows n join old_rows o on o.id = n.id
        cross join lateral (select n.region union select o.region) as r
        where (n.region, n.cluster, n.rack, n.gpu_type, n.gpus, n.cpus_milli, n.memory_bytes, n.held, n.free_cpus_milli,
               n.free_memory_bytes, n.state = 'ready', n.cordon is null, n.draining)
            is distinct from
              (o.region, o.cluster, o.rack, o.gpu_type, o.gpus, o.cpus_milli, o.memory_bytes, o.held, o.free_cpus_milli,
               o.free_memory_bytes, o.state = 'ready', o.cordon is null, o.draining);
    end if;
    return null;
end $$;

create function named_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values (tg_table_name, '');
    return null;
end $$;

create function all_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values ('everything', '');
    return null;
end $$;

do $$
declare
    name text;
begin
    foreach name in array array['workload', 'attempt', 'allocation', 'machine'] loop
        execute format('create trigger %1$s_inserted after insert on %1$s referencing new table as new_rows'
            || ' for each statement execute function %1$s_changed()', name);
        execute format('create trigger %1$s_updated after update on %1$s'
            || ' referencing new table as new_rows old table as old_rows'
            || ' for each statement execute function %1$s_changed()', name);
        execute format('create trigger %1$s_deleted after delete on %1$s referencing old table as old_rows'
            || ' for each statement execute function %1$s_changed()', name);
        execute format('create trigger %1$s_truncated after truncate on %1$s'
            || ' for each statement execute function all_changed()', name);
    end loop;
    foreach name in array array['tenant', 'region'] loop
        execute format('create trigger %1$s_changed after insert or update or delete or truncate on %1$s'
            || ' for each statement execute function named_changed()', name);
    end loop;
end $$;
