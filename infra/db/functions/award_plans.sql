-- The award (MAST 4.3). Locks the rows that the plans depend on, checks each plan against the state that the plans
-- before it leave, and writes all plans before the first invalid one. `activities.scheduling.awards` builds
-- `candidates`, in queue order, each with these fields:
--
--     workload, rank, region, gpu_types, cpus_milli, plan, detail    written unchanged
--     reason, waiting_reason       reason of the new phase: if the attempt holds everything, or if it waits for victims
--     machines                     [{machine, gpus, cpus_milli, memory_bytes}], the resources requested on each machine
--     victims                      [{victim, attempt}], with the attempt that the bid refers to
--
-- Returns `awarded`, the number of plans that were written, and `gone`. `gone` is null if all plans were written.
-- Otherwise it describes the next candidate: true if it is not queued any more, false if its plan became invalid.
--
-- One call is one transaction and one round trip. Query plans are prepared once for each connection, independently of
-- the sizes of the tables, so they must use index lookups. Locks are taken in the order of
-- `activities.lifecycle.handover`: workloads by id, machines by id, then the rows that are written under these locks.
create or replace function award_plans(candidates jsonb, out awarded bigint, out gone boolean) returns record
language plpgsql set plan_cache_mode to 'force_generic_plan'
set enable_seqscan to 'off' set enable_hashjoin to 'off' set enable_mergejoin to 'off' as $$
declare
    -- What is locked, in parallel arrays.
    known text[];
    tenants text[];
    attempts bigint[];
    queued boolean[];
    machines text[];
    free bigint[];  -- Null where no work is taken.
    promised_to bigint[];
    free_cpus bigint[];
    free_memory bigint[];
    -- What one candidate wants of one machine, and gets: held at once, or awaited from its victims.
    wish record;
    given record;
    at int;
    number bigint := 0;
    held bigint;
    due bigint;
    due_cpus bigint;
    due_memory bigint;
    evicted text[] := '{}';
    ready boolean[] := '{}';
    -- What will be allocated, in parallel arrays.
    of_number bigint[] := '{}';
    of_machine text[] := '{}';
    of_held bigint[] := '{}';
    of_due bigint[] := '{}';
    of_cpus bigint[] := '{}';
    of_due_cpus bigint[] := '{}';
    of_memory bigint[] := '{}';
    of_due_memory bigint[] := '{}';
begin
    select array_agg(w.id), array_agg(w.tenant), array_agg(w.attempt),
           array_agg(w.phase in ('pending', 'preempted') and w.held_by is null)
    into known, tenants, attempts, queued
    from (
        select id, tenant, attempt, phase, held_by from workload where id = any (array(
            select c ->> 'workload' from jsonb_array_elements(candidates) as c
            union all select v ->> 'victim' from jsonb_path_query(candidates, '$[*].victims[*]') as v))
        order by id for update) as w;
    select array_agg(m.id), array_agg(m.free), array_agg(m.promised), array_agg(m.free_cpus_milli),
           array_agg(m.free_memory_bytes)
    into machines, free, promised_to, free_cpus, free_memory
    from (
        select id, promised, free_cpus_milli, free_memory_bytes,
               case when state = 'ready' and cordon is null and not draining
                   then ((1::bigint << gpus::int) - 1) & ~machine.held end as free
        from machine where id = any (array(
            select m ->> 'machine' from jsonb_path_query(candidates, '$[*].machines[*]') as m))
        order by id for update) as m;

    for wish in
        select c.*, s.*
        from rows from (jsonb_to_recordset(candidates) as (workload text, machines jsonb, victims jsonb))
                 with ordinality as c (workload, machines, victims, number),
             jsonb_to_recordset(c.machines) as s (machine text, gpus bigint, cpus_milli bigint, memory_bytes bigint)
    loop
        if wish.number > number then
            number := wish.number;
            at := array_position(known, wish.workload);
            if at is null or not queued[at] then
                gone := true;
                exit;
            end if;
            if wish.victims <> '[]' then
                -- Read without locks of their own: the workloads', which are held, keep all that is asked as it is.
                select bool_and(
                    coalesce(a.attempt = v.attempt and a.released_at is null and a.evicting_since is null, false)
                    and v.victim <> all (evicted)
                    and not exists (select from eviction as e where e.evictor = v.victim and e.victim = wish.workload and e.change = newest_outside_change())
                ) as good, array_agg(v.victim) as ids
                into given
                from jsonb_to_recordset(wish.victims) as v (victim text, attempt bigint)
                left join workload as w on w.id = v.victim
                left join attempt as a on a.workload = w.id and a.attempt = w.attempt;
                if not given.good then
                    gone := false;
                    exit;
                end if;
                evicted := evicted || given.ids;
            end if;
            ready[number] := true;
        end if;

        -- Free resources first, the rest as successor of the victims.
        at := array_position(machines, wish.machine);
        if at is null or free[at] is null then
            gone := false;
            exit;
        end if;
        held := lowest_bits(free[at], wish.gpus);
        due := 0;
        due_cpus := greatest(wish.cpus_milli - free_cpus[at], 0);
        due_memory := greatest(wish.memory_bytes - free_memory[at], 0);
        if bit_count(held::bit(64)) < wish.gpus or due_cpus > 0 or due_memory > 0 then
            -- Of what the victims hold there. Slots are disjoint: each has one holder.
            select coalesce(bit_or(l.slots), 0) as slots, coalesce(sum(l.cpus_milli - l.awaited_cpus_milli), 0) as cpus,
                   coalesce(sum(l.memory_bytes - l.awaited_memory_bytes), 0) as memory
            into given
            from jsonb_to_recordset(wish.victims) as v (victim text, attempt bigint)
            join allocation as l on l.workload = v.victim and l.attempt = v.attempt and l.machine = wish.machine
            where l.released_at is null;
            due := lowest_bits(given.slots & ~promised_to[at], wish.gpus - bit_count(held::bit(64)));
            if bit_count((held | due)::bit(64)) < wish.gpus or due_cpus > given.cpus or due_memory > given.memory then
                gone := false;
                exit;
            end if;
            promised_to[at] := promised_to[at] | due;
            if due <> 0 or due_cpus > 0 or due_memory > 0 then
                ready[number] := false;
            end if;
        end if;
        free[at] := free[at] & ~held;
        free_cpus[at] := free_cpus[at] - wish.cpus_milli + due_cpus;
        free_memory[at] := free_memory[at] - wish.memory_bytes + due_memory;
        of_number := of_number || number;
        of_machine := of_machine || wish.machine;
        of_held := of_held || held;
        of_due := of_due || due;
        of_cpus := of_cpus || wish.cpus_milli;
        of_due_cpus := of_due_cpus || due_cpus;
        of_memory := of_memory || wish.memory_bytes;
        of_due_memory := of_due_memory || due_memory;
    end loop;
    awarded := number - (gone is not null)::int;
    if awarded = 0 then
        return;
    end if;

    with accepted as materialized (
        select c.*, p.tenant, p.attempt, ready[c.number] as ready
        from rows from (jsonb_to_recordset(candidates) as (
                 workload text, rank bigint, region text, plan jsonb, gpu_types jsonb, cpus_milli bigint, reason jsonb,
                 waiting_reason jsonb, detail jsonb)) with ordinality as c (
                 workload, rank, region, plan, gpu_types, cpus_milli, reason, waiting_reason, detail, number),
             lateral (select array_position(known, c.workload) as at) as i,
             lateral (select tenants[i.at] as tenant, attempts[i.at] + 1 as attempt) as p
        where c.number <= awarded
    ), workloads as (
        update workload
        set attempt = a.attempt, region = a.region, phase = 'placing',
            reason = case when a.ready then a.reason else a.waiting_reason end
        from accepted as a where workload.id = a.workload
    ), events as (
        insert into event (kind, tenant, workload, attempt, region, reason, detail, dedup)
        select 'workload.placing', tenant, workload, attempt, region,
               case when a.ready then reason else waiting_reason end, detail, concat_ws(':', attempt, 'placing')
        from accepted as a
    ), mails as (
        insert into outbox (kind, workload, body)
        select 'mail', workload, jsonb_build_object(
            'kind', 'awarded', 'attempt', attempt, 'detail', jsonb_build_object(
                'ready', a.ready, 'region', region, 'rank', rank))
        from accepted as a
    ), waits as (
        delete from waiting using accepted as a where waiting.workload = a.workload
    )
    insert into attempt (workload, attempt, region, plan, awarded_at, ready_at, gpu_types, cpus_milli, rank)
    select workload, attempt, region, plan, clock_timestamp(), case when a.ready then clock_timestamp() end, gpu_types,
           cpus_milli, rank
    from accepted as a;

    insert into allocation (workload, attempt, machine, slots, awaited, cpus_milli, awaited_cpus_milli, memory_bytes,
                            awaited_memory_bytes, held_at)
    select c.workload, attempts[array_position(known, c.workload)] + 1, n.machine, n.held, n.due, n.cpus, n.due_cpus,
           n.memory, n.due_memory, case when n.due = 0 and n.due_cpus = 0 and n.due_memory = 0 then clock_timestamp() end
    from unnest(of_number, of_machine, of_held, of_due, of_cpus, of_due_cpus, of_memory, of_due_memory)
             as n (number, machine, held, due, cpus, due_cpus, memory, due_memory),
         lateral (select candidates -> (n.number::int - 1) ->> 'workload' as workload) as c
    where n.number <= awarded;

    if evicted <> '{}' then
        with evictions as (
            insert into eviction (evictor, evictor_attempt, victim, victim_attempt)
            select c.workload, attempts[array_position(known, c.workload)] + 1, v.victim, v.attempt
            from rows from (jsonb_to_recordset(candidates) as (workload text, rank bigint, victims jsonb))
                     with ordinality as c (workload, rank, victims, number),
                 jsonb_to_recordset(c.victims) as v (victim text, attempt bigint)
            where c.number <= awarded
            returning evictor, victim, victim_attempt
        ), leaving as (
            select a.workload, a.attempt, a.rank, e.evictor
            from attempt as a join evictions as e on a.workload = e.victim and a.attempt = e.victim_attempt
            order by a.workload for update of a
        ), victims as (
            update attempt set evicting_since = clock_timestamp(), evictor = l.evictor
            from leaving as l where attempt.workload = l.workload and attempt.attempt = l.attempt
        )
        insert into outbox (kind, workload, body)
        select 'mail', l.workload, jsonb_build_object(
            'kind', 'evict', 'attempt', l.attempt, 'detail', jsonb_build_object(
                'evictor', l.evictor, 'evictor_rank', c.rank, 'rank', l.rank))
        from leaving as l
        join jsonb_to_recordset(candidates) as c (workload text, rank bigint) on c.workload = l.evictor;
    end if;
end $$;
