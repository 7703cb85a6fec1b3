create or replace function workload_ask(spec jsonb) returns text language sql immutable parallel safe as $$
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
        'capacity', case when spec ->> 'cluster' is null then spec -> 'capacity'
            else jsonb_build_array('cluster:' || (spec ->> 'cluster')) end,
        'max_runtime_s', spec -> 'limits' -> 'max_runtime_s'))::text
$$;
create function service_wake(replica text) returns void language plpgsql as $$
begin
    insert into outbox (kind, body)
    select 'service', jsonb_build_object('service', service)
    from service_replica where workload = replica and ended_at is null;
    if found then
        perform pg_notify('mizzen_outbox', '');
    end if;
end $$;
create function replica_workload_changed() returns trigger language plpgsql as $$
begin
    perform service_wake(new.id);
    return null;
end $$;
create function replica_instance_changed() returns trigger language plpgsql as $$
begin
    perform service_wake(new.workload);
    return null;
end $$;
create function replica_machine_noticed() returns trigger language plpgsql as $$
begin
    perform service_wake(a.workload) from allocation as a where a.machine = new.id and a.released_at is null;
    return null;
end $$;
create trigger replica_workload_changed after update of phase on workload for each row
    when (old.phase is distinct from new.phase and jsonb_exists(new.spec, 'serving'))
    execute function replica_workload_changed();
create trigger replica_instance_changed after update of phase, lost_at, ending on instance for each row
    when (new.workload is not null) execute function replica_instance_changed();
create trigger replica_machine_noticed after update of notice on machine for each row
    when (old.notice is null and new.notice is not null) execute function replica_machine_noticed();
