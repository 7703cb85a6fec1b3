-- Notifications of receivers that documents name (`infra.db.deliveries`), written in the transaction of the end.

-- Writes one notification for each receiver in `receivers`.
create function notify_receivers(kind text, tenant text, subject text, receivers jsonb, facts jsonb) returns void
language sql as $$
    insert into delivery (kind, tenant, subject, receiver, lane, facts)
    select kind, tenant, subject, r, tenant || ' ' || coalesce(
        substring(r ->> 'webhook' from '^[a-z]+://[^/]+'), 'secret ' || (r ->> 'webhook_secret'), 'mail'), facts
    from jsonb_array_elements(receivers) as r
$$;

-- An element of an array notifies only the receivers that asked for each element, and a runner notifies nobody.
create function notify_workload_end() returns trigger language plpgsql as $$
begin
    perform notify_receivers('workload.' || new.phase, new.tenant, new.id, jsonb_agg(r), jsonb_build_object(
        'id', new.id, 'name', new.name, 'tenant', new.tenant, 'labels', new.labels, 'phase', new.phase,
        'reason', new.reason, 'attempt', new.attempt, 'array', new.array_id, 'index', new.array_index,
        'submitted_at', new.submitted_at, 'finished_at', new.finished_at))
    from jsonb_array_elements(new.spec -> 'notify') as r
    where r -> 'on' ? new.phase and (new.array_id is null or (r ->> 'each')::boolean)
    having count(*) > 0;
    return null;
end $$;
create trigger workload_end_notifies after update of finished_at on workload for each row
    when (old.finished_at is null and new.finished_at is not null and jsonb_array_length(new.spec -> 'notify') > 0
          and (new.array_id is null) = (new.array_index is null))
    execute function notify_workload_end();

create function notify_service_end() returns trigger language plpgsql as $$
begin
    perform notify_receivers('service.ended', new.tenant, new.id, v.spec -> 'notify', jsonb_build_object(
        'id', new.id, 'name', new.name, 'tenant', new.tenant, 'labels', v.spec -> 'labels', 'version', new.version,
        'created_at', new.created_at, 'finished_at', new.ended_at))
    from service_version as v
    where v.service = new.id and v.version = new.version and jsonb_array_length(v.spec -> 'notify') > 0;
    return null;
end $$;
create trigger service_end_notifies after update of ended_at on service for each row
    when (old.ended_at is null and new.ended_at is not null) execute function notify_service_end();
