-- Dependencies of workloads. The transaction that changes what a dependency is about also decides it, and lets the
-- workload into the queue if that was the last one. What can never hold ends the workload in a later transaction
-- (`activities.lifecycle.dependencies`), so that a long chain of dependents does not delay the end of the first.

-- Whether no other phase follows a phase.
create function is_final(phase text) returns boolean language sql immutable parallel safe as $$
    select phase in ('succeeded', 'failed', 'cancelled')
$$;

-- Whether tasks of a workload in a phase run, or must have run.
create function shows_start(phase text) returns boolean language sql immutable parallel safe as $$
    select phase in ('running', 'succeeded')
$$;

-- Whether a condition on a workload that is in a phase holds (`met`), may hold later (`waiting`), or can never hold.
create function condition_state(condition text, predecessor text, phase text) returns text language sql stable as $$
    select case
        when condition = phase or condition = 'ended' and is_final(phase) then 'met'
        when condition = 'started' and (shows_start(phase) or exists (
            select from attempt where workload = predecessor and started_at is not null) or exists (
            -- The two indexes of elements are for those that have not ended, and for those that have.
            select from (
                select id from workload where array_id = predecessor and finished_at is null union all
                select id from workload where array_id = predecessor and finished_at is not null) as element
            join attempt on attempt.workload = element.id where attempt.started_at is not null)) then 'met'
        when is_final(phase) then 'never'
        else 'waiting' end
$$;

create function decide_dependents() returns trigger language plpgsql as $$
begin
    -- Most workloads have no dependents.
    if exists (select from dependency where predecessor = new.id and state = 'waiting') then
        update dependency as d
        set state = condition_state(d.condition, new.id, new.phase), outcome = new.phase, decided_at = now()
        where d.predecessor = new.id and d.state = 'waiting'
          and condition_state(d.condition, new.id, new.phase) <> 'waiting';
    end if;
    -- An array starts with its first element.
    if new.array_id is not null and shows_start(new.phase) then
        update dependency set state = 'met', outcome = new.phase, decided_at = now()
        where predecessor = new.array_id and condition = 'started' and state = 'waiting';
    end if;
    return null;
end $$;
create trigger predecessor_changed after update of phase on workload for each row
    when (old.phase is distinct from new.phase and (shows_start(new.phase) or is_final(new.phase)))
    execute function decide_dependents();

create function decide_dependents_of_partitions() returns trigger language plpgsql as $$
begin
    update dependency as d set state = 'met', decided_at = now()
    from inserted as p
    where d.data_table = p.data_table and d.partition = p.name and d.state = 'waiting';
    return null;
end $$;
create trigger partitions_decide after insert on data_partition referencing new table as inserted
    for each statement execute function decide_dependents_of_partitions();

-- Derives `workload.blocked` from the workload's dependencies. The time until all hold does not count as waiting, as
-- time on hold does not (`api.workloads.actions`).
create function update_blocked() returns trigger language plpgsql as $$
begin
    -- Under the lock, the last of several transactions that decide dependencies of one workload reads all of them.
    perform from workload where id in (select workload from changed where state <> 'each') order by id for update;
    update workload as w set blocked = found.blocked, held_at = coalesce(w.held_at, now())
    from (
        select workload, case when bool_or(state = 'never') then 'never' else 'waiting' end as blocked
        from dependency where workload in (select workload from changed) and state in ('waiting', 'never')
        group by workload) as found
    where w.id = found.workload and w.finished_at is null and w.blocked is distinct from found.blocked;

    with eligible as (
        update workload as w
        set blocked = null, unheld_at = now(),
            paused_s = case when w.held_by is null
                then w.paused_s + greatest(extract(epoch from now() - w.held_at), 0) else w.paused_s end,
            held_at = case when w.held_by is not null then w.held_at end
        where w.id in (select workload from changed) and w.finished_at is null and w.blocked is not null
          and not exists (select from dependency where workload = w.id and state in ('waiting', 'never'))
        returning w.id, w.tenant
    ), told as (
        insert into event (kind, tenant, workload, attempt, dedup)
        select 'workload.eligible', tenant, id, 0, 'eligible' from eligible
    )
    insert into outbox (kind, body) select 'wake', '{}' where exists (select from eligible);
    if found then
        perform pg_notify('mizzen_event', ''), pg_notify('mizzen_outbox', '');
    end if;
    return null;
end $$;
create trigger dependencies_inserted after insert on dependency referencing new table as changed
    for each statement execute function update_blocked();
create trigger dependencies_decided after update on dependency referencing new table as changed
    for each statement execute function update_blocked();
