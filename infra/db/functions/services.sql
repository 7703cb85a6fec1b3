-- Wakes a service after a change of the workload of one of its replicas: sends a message to the service's workflow.
create function wake_service(replica text) returns void language plpgsql as $$
begin
    insert into outbox (kind, body)
    select 'service', jsonb_build_object('service', service)
    from service_replica where workload = replica and ended_at is null;
    if found then
        perform pg_notify('mizzen_outbox', '');
    end if;
end $$;

-- Tells a service about another phase of a replica's workload.
create function wake_service_of_workload() returns trigger language plpgsql as $$
begin
    perform wake_service(new.id);
    return null;
end $$;
create trigger replica_workload_changed after update of phase on workload for each row
    when (old.phase is distinct from new.phase and new.spec ->> 'serving' is not null)
    execute function wake_service_of_workload();

-- Tells a service about another phase of a replica's instance.
create function wake_service_of_instance() returns trigger language plpgsql as $$
begin
    perform wake_service(new.workload);
    return null;
end $$;
create trigger replica_instance_changed after update of phase, lost_at, ending on instance for each row
    when (new.workload is not null) execute function wake_service_of_instance();

-- Tells services that the platform reclaims a machine on which their replicas run.
create function wake_services_of_machine() returns trigger language plpgsql as $$
begin
    perform wake_service(a.workload) from allocation as a where a.machine = new.id and a.released_at is null;
    return null;
end $$;
create trigger replica_machine_noticed after update of notice on machine for each row
    when (old.notice is null and new.notice is not null) execute function wake_services_of_machine();
