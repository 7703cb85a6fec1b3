-- Sends mail to the workflow of the service that a replica's workload belongs to, so that it decides again.
create or replace function service_wake(replica text) returns void language plpgsql as $$
begin
    insert into outbox (kind, body)
    select 'service', jsonb_build_object('service', service)
    from service_replica where workload = replica and ended_at is null;
    if found then
        perform pg_notify('mizzen_outbox', '');
    end if;
end $$;
