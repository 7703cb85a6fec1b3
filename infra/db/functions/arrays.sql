-- The elements of arrays (`infra.db.array_rows`).

-- Returns the number of integers in a set.
create function multirange_size(numbers int4multirange) returns bigint language sql immutable parallel safe as $$
    select coalesce(sum(upper(r) - lower(r)), 0) from unnest(numbers) as r
$$;

-- Returns the ranges of an array's indexes, each with the position of its first index.
create function array_ranges(ranges jsonb) returns table (start bigint, first bigint, last bigint, step bigint)
language sql immutable parallel safe as $$
    select (coalesce(sum((l.last - l.first) / l.step + 1)
                         over (order by l.place rows between unbounded preceding and 1 preceding), 0))::bigint,
           l.first, l.last, l.step
    from (select place, (r ->> 0)::bigint as first, (r ->> 1)::bigint as last, (r ->> 2)::bigint as step
          from jsonb_array_elements(ranges) with ordinality as listed (r, place)) as l
$$;

-- Returns the positions of the elements that wait for elements of other arrays, or wait for them in vain.
create function array_blocked(head text) returns int4multirange language sql stable as $$
    select coalesce(range_agg(r), '{}') from dependency as d, unnest(d.open + d.never) as r
    where d.workload = head and d.state = 'each'
$$;

-- Returns the number of elements with a row that have not ended.
create function array_live(head text) returns bigint language sql stable as $$
    select count(*) from workload where array_id = head and array_index is not null and finished_at is null
$$;

-- Returns the number of elements that runners could lease, less the runners that have leased none yet. Queued runners
-- count if `queued`. What is on hold is not counted.
create function array_uncovered(a workload_array, queued boolean) returns bigint language sql stable as $$
    select multirange_size(a.waiting - array_blocked(a.id))
        + count(*) filter (where runner = '' and held_by is null)
        - count(*) filter (where array_index is null and held_by is null
                           and (queued or phase not in ('pending', 'preempted')))
        + count(distinct runner) filter (where runner <> '')
    from workload where array_id = a.id and finished_at is null
$$;

-- Returns the number of runners that an array needs beside those that live.
create function array_runners_needed(a workload_array) returns bigint language sql stable as $$
    select greatest(0, array_uncovered(a, queued => true))
$$;

-- Returns the positions of the elements that can be placed for the first time, or the numbers of the next runners.
create function array_next_positions(a workload_array) returns int4multirange language sql stable as $$
    select case when a.runners is null then a.waiting - array_blocked(a.id)
        else int4multirange(int4range(a.runners::int, (a.runners + array_runners_needed(a))::int)) end
$$;

-- Returns the number of elements, or of runners, that hold slots, or were awarded some. The throttle limits them. The
-- slots of an element that a runner has leased are those of the runner.
create function array_placed(head text) returns bigint language sql stable as $$
    select count(*) from workload
    where array_id = head and finished_at is null and phase not in ('pending', 'preempted') and runner is null
$$;

-- Returns the number of elements, or of runners, that may still be placed; null: there is no limit. A runner is placed
-- only if there is an element for it.
create function array_admitted(a workload_array) returns bigint language sql stable as $$
    select case when a.throttle is not null or a.runners is not null
        then greatest(0, least(a.throttle - array_placed(a.id),
                               case when a.runners is not null then array_uncovered(a, queued => false) end)) end
$$;

-- Returns the elements that a scan ranks: `positions` has at most `most` of those that wait for their first placement,
-- in ascending order, `more` the number of the others, and `throttled` the ids of those with a row that the throttle
-- keeps out. `ranges` has the indexes, and `free` how many the throttle admits. If runners run the elements, the
-- runners are ranked in their place: `positions` has the numbers of the next ones, and `ranges` is null.
--
-- All elements that are queued and not held compete for the places that the throttle leaves, the older first. An
-- element that avoids machines on which it failed takes no place from others before its award, because it may find no
-- room for a long time.
create function array_window(a workload_array, most bigint) returns text language sql stable as $$
    with place as (
        select admitted as free from array_admitted(a) as admitted where admitted is not null
    ), queued as (
        select w.id, coalesce(w.level, 1) as level, w.submitted_at + make_interval(secs => w.paused_s) as since,
               exists (select from attempt where workload = w.id and attempt = w.attempt
                                             and outcome -> 'detail' ? 'avoided') as avoids
        from workload as w, place
        where w.array_id = a.id and w.finished_at is null and w.phase in ('pending', 'preempted') and w.held_by is null
              and w.runner is null
    ), waiting as (
        select p as position from unnest(array_next_positions(a)) as r
        cross join lateral generate_series(lower(r), least(upper(r)::bigint - 1, lower(r) + most)) as p
        order by p limit least(most, (select free from place))
    ), admitted as (
        select id, position from (
            select id, null::bigint as position, false as held, level, since from queued where not avoids
            union all
            select null, q.position, h.held_by is not null, coalesce(h.level, 1),
                   h.submitted_at + make_interval(secs => h.paused_s) + q.position * interval '1 microsecond'
            from waiting as q, workload as h where h.id = a.id) as competing
        order by held, level, since limit (select free from place)
    )
    select jsonb_build_object(
        'ranges', case when a.runners is null then a.ranges end,
        'free', (select free from place),
        'more', case when a.runners is null then multirange_size(array_next_positions(a)) else 0 end
            - (select count(*) from admitted where id is null and a.runners is null),
        'positions', (select coalesce(jsonb_agg(position order by position), '[]') from admitted where id is null),
        'throttled', (
            select coalesce(jsonb_agg(id), '[]') from queued, place
            where free = 0 or not avoids and not exists (select from admitted where admitted.id = queued.id)))::text
$$;

-- Returns the combination of a matrix with an index, as an object. The last parameter changes fastest.
create function combination(matrix jsonb, index bigint) returns jsonb language plpgsql immutable strict as $$
declare
    options jsonb;
    number int;
    found jsonb = '{}';
begin
    for place in reverse jsonb_array_length(matrix) - 1 .. 0 loop
        options = matrix -> place -> 1;
        number = jsonb_array_length(options);
        found = found || jsonb_build_object(matrix -> place ->> 0, options -> (index % number)::int);
        index = index / number;
    end loop;
    return found;
end $$;

-- Inserts the rows of waiting elements, with their first event, and removes them from those that wait. Where the index
-- is null, inserts the row of a runner, whose position is its number. The caller has locked the head.
--
-- An element has the age of its array. The microseconds keep the order of the elements in the queue. An element that is
-- run by runners is leased by one of them, and has no event before its end. Of a list or a matrix of parameters it gets
-- its own, because they may be long; materialized expressions read them once. If combinations are left out, it has the
-- matrix: only `domain.array_elements` numbers the others.
create function take_elements(head text, positions bigint[], indexes bigint[]) returns void language sql as $$
    with listed as materialized (
        select coalesce(spec #> '{array,entries}', '[]') as entries, coalesce(spec #> '{array,matrix}', '[]') as matrix,
               coalesce(spec #> '{array,exclude}', '[]') as exclude,
               spec #- '{array,entries}' #- '{array,matrix}' as others
        from workload where id = head
    ), own as materialized (
        select e.position, e.index, case
            when jsonb_array_length(entries) = 1 then case when e.index is not null then entries -> 0 end
            when jsonb_array_length(entries) > 1 then entries -> e.index::int
            when jsonb_array_length(matrix) > 0 and jsonb_array_length(exclude) = 0 then combination(matrix, e.index)
            end as parameters
        from listed, unnest(positions, indexes) as e (position, index)
    )
    insert into workload (
        id, tenant, name, labels, spec, reason, level, held_by, held_at, unheld_at, paused_s, submitted_at,
        submitted_by, array_id, array_index, runner)
    select h.id || '-' || coalesce(e.index::text, 'r' || e.position), h.tenant, h.name, h.labels,
           jsonb_set(l.others, '{array}', (l.others -> 'array') || jsonb_build_object(
               'throttle', null, 'ranges', case when e.index is null then '[]'
                   else jsonb_build_array(jsonb_build_array(e.index, e.index, 1)) end)
               || case when e.parameters is null
                   then jsonb_build_object('entries', l.entries, 'matrix', l.matrix)
                   else jsonb_build_object('entries', jsonb_build_array(e.parameters), 'matrix', '[]'::jsonb) end),
           h.reason, h.level, h.held_by, h.held_at, h.unheld_at, h.paused_s,
           h.submitted_at + e.position * interval '1 microsecond', h.submitted_by, h.id, e.index,
           case when e.index is not null and a.runners is not null then '' end
    from workload as h join workload_array as a using (id), listed as l, own as e
    where h.id = head;

    insert into event (kind, tenant, workload, attempt, reason, detail, dedup)
    select 'workload.pending', tenant, id, 0, reason, jsonb_build_object('name', name, 'array', array_id), 'submitted'
    from workload as w, unnest(positions, indexes) as e (position, index)
    where w.id = head || '-' || coalesce(e.index::text, 'r' || e.position) and runner is null;

    update workload_array set
        waiting = waiting - coalesce(
            (select range_agg(int4range(p::int, p::int + 1)) from unnest(positions, indexes) as e (p, i)
             where i is not null), '{}'),
        runners = greatest(runners, (select max(p) + 1 from unnest(positions, indexes) as e (p, i) where i is null))
    where id = head;
$$;

-- Logs what the scan of an array's elements depends on.
create function log_array_change() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values ('workload', new.id);
    return null;
end $$;
create trigger array_changed after update on workload_array for each row
    when ((new.waiting, new.throttle, new.runners) is distinct from (old.waiting, old.throttle, old.runners))
    execute function log_array_change();

-- The end of an element or a runner: the throttle may admit another one, and the array may have ended. The lock makes a
-- concurrent change of the waiting elements wait for the commit, or shows it. Leased elements end many at a time
-- (`activities.lifecycle.leases`).
create function note_element_end() returns trigger language plpgsql as $$
begin
    insert into change (kind, key) values ('workload', new.array_id);
    perform from workload_array where id = new.array_id for share;
    insert into outbox (kind, body)
    select 'array', jsonb_build_object('array', id) from workload_array where id = new.array_id and isempty(waiting);
    return null;
end $$;
create trigger element_ended after update of finished_at on workload for each row
    when (new.array_id is not null and old.finished_at is null and new.finished_at is not null
          and coalesce(new.runner, '') = '')
    execute function note_element_end();

-- Logs that the elements have changed that compete for the places of a throttle, or for which runners are needed.
create function log_competing_element() returns trigger language plpgsql as $$
begin
    insert into change (kind, key)
    select 'workload', id from workload_array where id = new.array_id and (throttle is not null or runners is not null);
    return null;
end $$;
create trigger element_changed after update on workload for each row when (
    new.array_id is not null and (
        new.runner is null and
        (new.phase in ('pending', 'preempted'), new.held_by is null, new.level, new.paused_s) is distinct from
        (old.phase in ('pending', 'preempted'), old.held_by is null, old.level, old.paused_s)
        or new.runner = '' and (new.held_by is null) <> (old.held_by is null)))
    execute function log_competing_element();
