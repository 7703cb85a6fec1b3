-- Books the places of the next attempts of running workloads, and tells the running attempts to stop. All or none of
-- `bookings` are made: false if a plan does not hold any more, or an attempt does not run or is being stopped already.
-- `activities.scheduling.bookings` makes the array: objects with `attempt`, `code`, `stop` (the detail of the message),
-- `candidate` (an `award_candidate`) and `frees`: the running attempt, if its next attempt may get slots that it holds.
--
-- A booking inserts allocations for the next attempt, so that no other workload gets these slots. When the running
-- attempt is released (`activities.lifecycle.handover`), these allocations are deleted, and `award_plans` allocates the
-- same slots in the same transaction. Rows are locked in the order that `handover` describes.
create function book_places(bookings jsonb) returns boolean
language plpgsql set plan_cache_mode to 'force_generic_plan' as $$
declare
    batch award_candidate[];
    workload_ids text[];
    machine_ids text[];
    machines award_machine[];
    candidate award_candidate;
    accepted award_candidate[] := '{}';
begin
    batch := array(
        select jsonb_populate_record(
            null::award_candidate, (b -> 'candidate') || jsonb_build_object('victims', b -> 'frees'))
        from jsonb_array_elements(bookings) as b);

    -- 1. Lock the workloads, by id. Their attempts must run, and nothing may stop them yet.
    perform from workload where id = any (array(select c.workload from unnest(batch) as c)) order by id for update;
    select array_agg(w.id) into workload_ids
    from jsonb_array_elements(bookings) as b
    join workload as w on w.id = b -> 'candidate' ->> 'workload' and w.attempt = (b ->> 'attempt')::bigint
    join attempt as a on a.workload = w.id and a.attempt = w.attempt
    where w.phase = 'running' and w.held_by is null and a.released_at is null
      and a.evicting_since is null and not exists (select from booking as k where k.workload = w.id);
    if cardinality(workload_ids) is distinct from cardinality(batch) then
        return false;
    end if;

    -- 2. Lock the machines, by id, and allocate.
    select array_agg(m.id), array_agg(m.machine) into machine_ids, machines
    from award_lock_machines(array(select r.machine from unnest(batch) as c, unnest(c.machines) as r)) as m;
    foreach candidate in array batch loop
        select w.tenant, w.attempt + 1 into candidate.tenant, candidate.attempt
        from workload as w where w.id = candidate.workload;
        select g.machines, g.allocations into machines, candidate.allocations
        from award_allocate_gang(candidate, machine_ids, machines) as g;
        if candidate.allocations is null then
            return false;
        end if;
        accepted := accepted || candidate;
    end loop;

    -- 3. Write the bookings, mark the attempts, and send the messages.
    insert into booking (workload, attempt, code, candidate)
    select b -> 'candidate' ->> 'workload', (b ->> 'attempt')::bigint, b ->> 'code', b -> 'candidate'
    from jsonb_array_elements(bookings) as b;

    insert into allocation (workload, attempt, machine, slots, awaited, cpus_milli, awaited_cpus_milli, memory_bytes,
                            awaited_memory_bytes)
    select c.workload, c.attempt, l.machine, l.held, l.awaited, l.cpus_milli, l.awaited_cpus_milli, l.memory_bytes,
           l.awaited_memory_bytes
    from unnest(accepted) as c, unnest(c.allocations) as l;

    update attempt as a set evicting_since = clock_timestamp()
    from unnest(accepted) as c where a.workload = c.workload and a.attempt = c.attempt - 1;

    insert into outbox (kind, workload, body)
    select 'mail', b -> 'candidate' ->> 'workload', jsonb_build_object(
        'kind', 'preempt', 'attempt', (b ->> 'attempt')::bigint, 'detail',
        (b -> 'stop') || jsonb_build_object('code', b ->> 'code'))
    from jsonb_array_elements(bookings) as b;
    return true;
end $$;
