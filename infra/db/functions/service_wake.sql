-- Wakes a service after a change of the workload of one of its replicas: sends mail to the service's workflow.
create or replace function service_wake(replica text) returns void language plpgsql as $$
begin
    insert into outbox (kind, body)
    select 'service', jsonb_build_object('service', service)
    from service_replica where workload = replica and ended_at is null;
    if found then
        perform pg_notify('mizzen_outbox', '');
    end if;
end $$;
