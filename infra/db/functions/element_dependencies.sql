-- Dependencies of the elements of an array on the elements of another array that have the same index. A row of
-- `dependency` with the state `each` has the positions of the dependent array: `open` those that are not decided, and
-- `never` those that wait in vain. Both are never placed (`array_blocked`).

-- Decides the dependencies on elements of an array, which have these indexes and have reached a phase.
create function decide_each(head text, indexes bigint[], reached text) returns void language plpgsql as $$
begin
    -- In one order, because elements with several dependents may end at the same time.
    perform from dependency where predecessor = head and state = 'each' order by workload, place for update;
    if not found then
        return;
    end if;
    with decided as (
        select d.workload, d.place, range_agg(int4range(p.position, p.position + 1)) as positions,
               coalesce(range_agg(int4range(p.position, p.position + 1)) filter (where s.state = 'never'),
                        '{}') as never
        from dependency as d
        join workload_array as a on a.id = d.workload
        cross join lateral array_ranges(a.ranges) as r
        join unnest(indexes) as i (index) on i.index between r.first and r.last and (i.index - r.first) % r.step = 0
        cross join lateral (select (r.start + (i.index - r.first) / r.step)::int as position) as p
        cross join lateral (
            -- Only whether an element has started depends on more than its phase.
            select case when d.condition = 'started' then condition_state(d.condition, head || '-' || i.index, reached)
                        when d.condition = reached or d.condition = 'ended' and is_final(reached) then 'met'
                        when is_final(reached) then 'never' else 'waiting' end as state) as s
        where d.predecessor = head and d.state = 'each' and s.state <> 'waiting'
        group by d.workload, d.place
    )
    update dependency as d
    set open = d.open - decided.positions, never = d.never + decided.never * d.open
    from decided
    where d.workload = decided.workload and d.place = decided.place and d.open && decided.positions;
end $$;

-- Decides the dependencies on elements that were cancelled before they had a row, which are among these positions.
create function decide_each_unplaced(a workload_array, positions int4multirange) returns void language sql as $$
    select decide_each(a.id, array_agg(unplaced.index), 'cancelled')
    from (
        select r.first + (p - r.start) * r.step as index
        from unnest(positions) as m
        cross join lateral generate_series(lower(m), upper(m) - 1) as p
        join array_ranges(a.ranges) as r on p >= r.start and p <= r.start + (r.last - r.first) / r.step) as unplaced
    where not exists (select from workload where id = a.id || '-' || unplaced.index)
    having count(*) > 0
$$;

-- Adds a dependency on the elements of an array, decided as far as it can be now. The lock makes changes of elements
-- that are not committed yet come first, or decide this dependency.
create function add_each(dependent text, at bigint, head text, wanted text) returns void language plpgsql as $$
declare
    a workload_array;
begin
    select * into a from workload_array where id = head for update;
    insert into dependency (workload, place, predecessor, predecessor_name, condition, state, open, never)
    select dependent, at, w.id, w.name, wanted, 'each', int4multirange(int4range(0, own.elements::int)), '{}'
    from workload as w, workload_array as own where w.id = head and own.id = dependent;

    -- The two indexes of elements are for those that have not ended, and for those that have.
    perform decide_each(head, array_agg(array_index), phase)
    from (select array_index, phase from workload where array_id = head and finished_at is null union all
          select array_index, phase from workload where array_id = head and finished_at is not null) as element
    group by phase;
    perform decide_each_unplaced(a, int4multirange(int4range(0, a.elements::int)) - a.waiting);
end $$;

create function element_decides() returns trigger language plpgsql as $$
begin
    perform from workload_array where id = new.array_id for share;
    perform decide_each(new.array_id, array[new.array_index], new.phase);
    return null;
end $$;
create trigger element_decides after update of phase on workload for each row
    when (new.array_index is not null and old.phase is distinct from new.phase
          and (shows_start(new.phase) or is_final(new.phase)))
    execute function element_decides();

create function waiting_elements_decide() returns trigger language plpgsql as $$
begin
    if exists (select from dependency where predecessor = new.id and state = 'each') then
        perform decide_each_unplaced(new, old.waiting - new.waiting);
    end if;
    return null;
end $$;
create trigger waiting_elements_decide after update of waiting on workload_array for each row
    when (old.waiting <> new.waiting) execute function waiting_elements_decide();

-- Logs that the elements have changed that a scan ranks, and wakes the scheduler if there may be more of them.
create function note_each_decided() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values ('workload', new.workload);
    if new.open + new.never <> old.open + old.never then
        insert into outbox (kind, body) values ('wake', '{}');
        perform pg_notify('mizzen_outbox', '');
    end if;
    return null;
end $$;
create trigger each_decided after update of open, never on dependency for each row
    when ((old.open, old.never) is distinct from (new.open, new.never)) execute function note_each_decided();
