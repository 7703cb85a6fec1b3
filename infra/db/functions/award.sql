-- The award in the database. The composite types describe the candidates that `award_plans` reads, the rows that it
-- locks, and the allocations that it writes.

-- What a candidate requests of one machine.
create type award_request as (machine text, gpus bigint, cpus_milli bigint, memory_bytes bigint);

-- A workload that a candidate evicts, and the attempt that the candidate's bid is about.
create type award_victim as (victim text, attempt bigint);

-- What a candidate gets on one machine. `held` and `awaited` are masks of slots; `cpus_milli` and `memory_bytes`
-- include what is awaited. `ready`: nothing is awaited from victims.
create type award_allocation as (
    machine text, held bigint, awaited bigint, cpus_milli bigint, awaited_cpus_milli bigint, memory_bytes bigint,
    awaited_memory_bytes bigint, ready boolean
);

-- A waiting element of an array, or a runner, whose index is null. It has no row yet.
create type award_element as (head text, position bigint, index bigint);

-- A workload with its plan, as `activities.scheduling.awards` sends it. The last four fields are set by the check.
create type award_candidate as (
    workload text, element award_element, rank bigint, region text, plan jsonb, gpu_types jsonb, cpus_milli bigint,
    detail jsonb,
    machines award_request[], victims award_victim[],
    reason jsonb,          -- Of its phase, if everything is held at once.
    waiting_reason jsonb,  -- Of its phase, if it waits for victims.
    tenant text, attempt bigint, ready boolean, allocations award_allocation[]
);

-- A locked workload. `queued`: it is in a queued phase, and no user holds it back. `head`: its array.
create type award_workload as (tenant text, attempt bigint, queued boolean, head text);

-- An array whose head is locked: the positions of the elements that wait, and the number of elements that may still be
-- placed (null: any); or those of its runners.
create type award_array as (waiting int4multirange, admitted bigint);

-- A locked machine. `free_slots` and `promised_slots` are masks; `free_slots` is null if the machine takes no work.
-- `tenants`: the only ones that may use it; null: any.
create type award_machine as (
    free_slots bigint, promised_slots bigint, free_cpus_milli bigint, free_memory_bytes bigint, tenants text[]
);

-- Returns the `count` lowest set bits of `mask`, or all set bits if it has fewer.
create function lowest_bits(mask bigint, count bigint) returns bigint language plpgsql immutable parallel safe as $$
declare
    rest bigint := mask;
begin
    if count >= bit_count(mask::bit(64)) then
        return mask;
    end if;
    for _ in 1..count loop
        rest := rest & (rest - 1);
    end loop;
    return mask & ~rest;
end $$;

-- Whether a candidate may evict all of its victims. Each victim must still have the attempt that the bid is about, must
-- not be evicted already, and must not be immune: a victim is immune if it evicted the candidate and the queue has not
-- changed from outside since.
--
-- `evicted` lists the victims of the candidates before. The caller has locked the candidate and the victims, so nothing
-- that is read here can change.
create function award_victims_evictable(candidate text, victims award_victim[], evicted text[]) returns boolean
language plpgsql stable as $$
begin
    return not exists (
        select from unnest(victims) as v
        left join workload as w on w.id = v.victim and w.attempt = v.attempt
        left join attempt as a on a.workload = w.id and a.attempt = w.attempt
                              and a.released_at is null and a.evicting_since is null
        where a.workload is null
           or v.victim = any (evicted)
           or exists (
                select from eviction as e
                where e.evictor = v.victim and e.victim = candidate and e.change = newest_outside_change()));
end $$;

-- What a candidate gets on one machine: it holds free resources at once, and awaits the rest from its victims. Null if
-- that is not enough, or if the machine takes no work.
create function award_allocate(machine award_machine, requested award_request, victims award_victim[])
returns award_allocation language plpgsql stable as $$
declare
    allocation award_allocation;
    missing_gpus bigint;
    released record;  -- What the victims hold on the machine.
begin
    if machine.free_slots is null then
        return null;
    end if;
    allocation.machine := requested.machine;
    allocation.held := lowest_bits(machine.free_slots, requested.gpus);
    allocation.awaited := 0;
    allocation.cpus_milli := requested.cpus_milli;
    allocation.awaited_cpus_milli := greatest(requested.cpus_milli - machine.free_cpus_milli, 0);
    allocation.memory_bytes := requested.memory_bytes;
    allocation.awaited_memory_bytes := greatest(requested.memory_bytes - machine.free_memory_bytes, 0);

    missing_gpus := requested.gpus - bit_count(allocation.held::bit(64));
    allocation.ready :=
        missing_gpus = 0 and allocation.awaited_cpus_milli = 0 and allocation.awaited_memory_bytes = 0;
    if allocation.ready then
        return allocation;
    end if;

    -- What a victim itself still awaits cannot be released by it.
    select coalesce(bit_or(l.slots), 0) as slots,
           coalesce(sum(l.cpus_milli - l.awaited_cpus_milli), 0) as cpus_milli,
           coalesce(sum(l.memory_bytes - l.awaited_memory_bytes), 0) as memory_bytes
    into released
    from unnest(victims) as v
    join allocation as l on l.workload = v.victim and l.attempt = v.attempt and l.machine = requested.machine
    where l.released_at is null;
    allocation.awaited := lowest_bits(released.slots & ~machine.promised_slots, missing_gpus);
    if bit_count(allocation.awaited::bit(64)) < missing_gpus
       or allocation.awaited_cpus_milli > released.cpus_milli
       or allocation.awaited_memory_bytes > released.memory_bytes then
        return null;
    end if;
    return allocation;
end $$;

-- Locks machines by id, and returns them.
create function award_lock_machines(wanted text[]) returns table (id text, machine award_machine)
language plpgsql as $$
begin
    return query
    select m.id, (m.free_slots, m.promised | m.withheld, m.free_cpus_milli, m.free_memory_bytes,
                  case when m.pool <> '' then (
                      select nullif(p.tenants, '{}') from pool as p where p.region = m.region and p.name = m.pool)
                  end)::award_machine
    from (
        select k.id, promised, withheld, free_cpus_milli, free_memory_bytes, region, pool,
               case when state = 'ready' and cordon is null and not draining
                   then ((1::bigint << gpus::int) - 1) & ~(held | withheld) end as free_slots
        from machine as k where k.id = any (wanted)
        order by k.id for update) as m;
end $$;

-- What a candidate gets on its machines, whose pools must be for its tenant. Null if a machine lacks what is requested
-- of it. `machines` are the locked machines with the ids `machine_ids`; what is left is for the next candidates.
create function award_allocate_gang(
    candidate award_candidate, machine_ids text[], inout machines award_machine[], out allocations award_allocation[]
) returns record language plpgsql stable as $$
declare
    requested award_request;
    machine_index int;
    machine award_machine;
    allocation award_allocation;
begin
    allocations := '{}';
    foreach requested in array candidate.machines loop
        machine_index := array_position(machine_ids, requested.machine);
        machine := machines[machine_index];
        allocation := award_allocate(machine, requested, candidate.victims);
        if allocation is null or candidate.tenant <> all (machine.tenants) then
            allocations := null;
            return;
        end if;
        machine.free_slots := machine.free_slots & ~allocation.held;
        machine.promised_slots := machine.promised_slots | allocation.awaited;
        machine.free_cpus_milli := machine.free_cpus_milli - (allocation.cpus_milli - allocation.awaited_cpus_milli);
        machine.free_memory_bytes :=
            machine.free_memory_bytes - (allocation.memory_bytes - allocation.awaited_memory_bytes);
        machines[machine_index] := machine;
        allocations := allocations || allocation;
    end loop;
end $$;

-- The award (MAST 4.3): commits a batch of plans in queue order, up to the first plan that does not hold any more.
-- `activities.scheduling.awards` makes the batch, an array of `award_candidate` as JSON.
--
-- `awarded` is the number of candidates that were awarded. `gone` is null if all were. Otherwise it is about the first
-- candidate that was not: true if its workload is no longer queued, false if its plan is stale.
--
-- One call is one transaction and one round trip. Each connection plans the statements once. The settings below make
-- these plans look rows up by their keys, whatever sizes the tables have at that time. Locks are taken in the order of
-- `activities.lifecycle.handover`: workloads by id, machines by id, then what is written under them.
create function award_plans(candidates jsonb, out awarded bigint, out gone boolean) returns record
language plpgsql set plan_cache_mode to 'force_generic_plan'
set enable_seqscan to 'off' set enable_hashjoin to 'off' set enable_mergejoin to 'off' as $$
declare
    batch award_candidate[];
    -- The locked rows, and their ids in the same order, in which `array_position` finds the index of a row.
    workload_ids text[];
    workloads award_workload[];
    head_ids text[];
    heads award_array[];
    machine_ids text[];
    machines award_machine[];
    -- What is checked at the moment.
    candidate award_candidate;
    workload award_workload;
    head_index int;
    head award_array;
    allocations award_allocation[];
    -- The result of the check.
    accepted award_candidate[] := '{}';
    evicted text[] := '{}';
    verdict text;  -- On the first candidate that is not accepted: `gone` or `stale`, as in `awards.Verdict`.
begin
    batch := array(select c from jsonb_populate_recordset(null::award_candidate, candidates) as c);

    -- 1. Lock the workloads of the candidates, the arrays of elements, and the victims, by id.
    select array_agg(w.id),
           array_agg((w.tenant, w.attempt, w.phase in ('pending', 'preempted') and w.held_by is null,
                      w.array_id)::award_workload)
    into workload_ids, workloads
    from (
        select id, tenant, attempt, phase, held_by, array_id from workload where id = any (array(
            select coalesce((c.element).head, c.workload) from unnest(batch) as c
            union all select e.array_id from unnest(batch) as c join workload as e on e.id = c.workload
            union all select v.victim from unnest(batch) as c, unnest(c.victims) as v))
        order by id for update) as w;

    -- The arrays are read after their heads were locked. Only an award makes an element placed.
    select array_agg(a.id), array_agg((array_next_positions(a), array_admitted(a))::award_array)
    into head_ids, heads from workload_array as a where a.id = any (workload_ids);

    -- 2. Lock the machines, by id.
    select array_agg(m.id), array_agg(m.machine) into machine_ids, machines
    from award_lock_machines(array(select r.machine from unnest(batch) as c, unnest(c.machines) as r)) as m;

    -- 3. Check each candidate against the state that the candidates before it leave.
    <<check_candidates>>
    foreach candidate in array batch loop
        -- 3.1 The workload must still be queued. The throttle of its array must admit an element, and an element
        -- without a row must wait.
        workload := workloads[array_position(
            workload_ids, coalesce((candidate.element).head, candidate.workload))];
        if workload.queued is not true then
            verdict := 'gone';
            exit check_candidates;
        end if;
        head_index := array_position(head_ids, coalesce((candidate.element).head, workload.head));
        if head_index is not null then
            head := heads[head_index];
            if not head.waiting @> (candidate.element).position::int or head.admitted <= 0 then
                verdict := 'gone';
                exit check_candidates;
            end if;
        end if;

        -- 3.2 The candidate must still be allowed to evict its victims.
        if cardinality(candidate.victims) > 0 then
            if not award_victims_evictable(candidate.workload, candidate.victims, evicted) then
                verdict := 'stale';
                exit check_candidates;
            end if;
            evicted := evicted || array(select v.victim from unnest(candidate.victims) as v);
        end if;

        -- 3.3 Each machine must have what is requested of it, and its pool must be for the tenant. What is left is for
        -- the candidates after this one.
        candidate.tenant := workload.tenant;
        select g.machines, g.allocations into machines, allocations
        from award_allocate_gang(candidate, machine_ids, machines) as g;
        if allocations is null then
            verdict := 'stale';
            exit check_candidates;
        end if;
        candidate.ready := (select bool_and(a.ready) from unnest(allocations) as a);

        -- 3.4 The candidate is accepted, as the next attempt of its workload.
        candidate.attempt := workload.attempt + 1;
        candidate.allocations := allocations;
        if not candidate.ready then
            candidate.reason := candidate.waiting_reason;
        end if;
        accepted := accepted || candidate;
        if head_index is not null then
            head.admitted := head.admitted - 1;
            heads[head_index] := head;
        end if;
    end loop;

    awarded := cardinality(accepted);
    gone := verdict = 'gone';
    if awarded = 0 then
        return;
    end if;

    -- 4. Insert the rows of elements of arrays.
    if head_ids is not null then
        perform take_elements(e.head, array_agg(e.position), array_agg(e.index))
        from (select (c.element).* from unnest(accepted) as c) as e where e.head is not null group by e.head;
    end if;

    -- 5. Write the attempts, phases, events and messages of the accepted candidates.
    insert into attempt (workload, attempt, region, plan, awarded_at, ready_at, gpu_types, cpus_milli, rank)
    select c.workload, c.attempt, c.region, c.plan, clock_timestamp(), case when c.ready then clock_timestamp() end,
           c.gpu_types, c.cpus_milli, c.rank
    from unnest(accepted) as c;

    update workload as w
    set attempt = c.attempt, region = c.region, phase = 'placing', reason = c.reason
    from unnest(accepted) as c where w.id = c.workload;

    insert into event (kind, tenant, workload, attempt, region, reason, detail, dedup)
    select 'workload.placing', c.tenant, c.workload, c.attempt, c.region, c.reason, c.detail,
           concat_ws(':', c.attempt, 'placing')
    from unnest(accepted) as c;

    insert into outbox (kind, workload, body)
    select 'mail', c.workload, jsonb_build_object(
        'kind', 'awarded', 'attempt', c.attempt, 'detail', jsonb_build_object(
            'ready', c.ready, 'region', c.region, 'rank', c.rank))
    from unnest(accepted) as c;

    delete from waiting as q using unnest(accepted) as c where q.workload = c.workload;

    -- 6. Write the allocations.
    insert into allocation (workload, attempt, machine, slots, awaited, cpus_milli, awaited_cpus_milli, memory_bytes,
                            awaited_memory_bytes, held_at)
    select c.workload, c.attempt, l.machine, l.held, l.awaited, l.cpus_milli, l.awaited_cpus_milli, l.memory_bytes,
           l.awaited_memory_bytes, case when l.ready then clock_timestamp() end
    from unnest(accepted) as c, unnest(c.allocations) as l;

    -- 7. Start the evictions: record them, mark the victims' attempts, and send messages to the victims.
    if evicted <> '{}' then
        insert into eviction (evictor, evictor_attempt, victim, victim_attempt)
        select c.workload, c.attempt, v.victim, v.attempt
        from unnest(accepted) as c, unnest(c.victims) as v;

        with victims as (
            select a.workload, a.attempt, a.rank, c.workload as evictor, c.rank as evictor_rank
            from unnest(accepted) as c, unnest(c.victims) as v
            join attempt as a on a.workload = v.victim and a.attempt = v.attempt
            order by a.workload for update of a
        ), marked as (
            update attempt as a set evicting_since = clock_timestamp(), evictor = v.evictor
            from victims as v where a.workload = v.workload and a.attempt = v.attempt
        )
        insert into outbox (kind, workload, body)
        select 'mail', v.workload, jsonb_build_object(
            'kind', 'evict', 'attempt', v.attempt, 'detail', jsonb_build_object(
                'evictor', v.evictor, 'evictor_rank', v.evictor_rank, 'rank', v.rank))
        from victims as v;
    end if;
end $$;
