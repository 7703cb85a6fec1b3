-- The elements of arrays (`infra.db.array_rows`).

-- Returns the number of integers in a set.
create function multirange_size(numbers int4multirange) returns bigint language sql immutable parallel safe as $$
    select coalesce(sum(upper(r) - lower(r)), 0) from unnest(numbers) as r
$$;

-- Returns the number of elements with a row that have not ended.
create function array_live(head text) returns bigint language sql stable as $$
    select count(*) from workload where array_id = head and array_index is not null and finished_at is null
$$;

-- Returns the positions of the elements that wait, or the numbers that no runner has had.
create function array_positions(a workload_array) returns int4multirange language sql immutable as $$
    select case when a.runners is null then a.waiting
        else int4multirange(int4range(a.runners::int, a.runners::int + 1000000)) end
$$;

-- Returns the number of elements with a row, or of runners, that have not ended.
create function array_placed(a workload_array) returns bigint language sql stable as $$
    select count(*) from workload
    where array_id = a.id and (array_index is null) = (a.runners is not null) and finished_at is null
$$;

-- Returns the number of elements, or runners, that may be placed now beside those that live; null: any number. A runner
-- is needed for each element that waits, less those runners that have leased none yet.
create function array_admits(a workload_array) returns bigint language sql stable as $$
    select least(a.throttle - array_placed(a), case when a.runners is not null then (
        select multirange_size(a.waiting) + count(*) filter (where runner = '' and held_by is null)
            - count(*) filter (where array_index is null) + count(distinct runner) filter (where runner <> '')
        from workload where array_id = a.id and finished_at is null) end)
$$;

-- Returns the elements that a scan ranks: at most `most` of those that wait and that the throttle admits, as positions
-- in ascending order, with the indexes of the array. Of an array with runners: the numbers of the next runners.
create function array_window(a workload_array, most bigint) returns text language sql stable as $$
    select jsonb_build_object(
        'ranges', case when a.runners is null then a.ranges end, 'positions', coalesce(jsonb_agg(p), '[]'))::text
    from (
        select p from unnest(array_positions(a)) as r
        cross join lateral generate_series(lower(r), least(upper(r)::bigint - 1, lower(r) + most)) as p
        order by p limit greatest(0, least(most, array_admits(a)))) as first
$$;

-- Inserts the rows of waiting elements, with their first event, and removes them from those that wait. Where the index is
-- null, inserts the row of a runner, whose position is its number. The caller has locked the head.
--
-- An element has the age of its array. The microseconds keep the order of the elements in the queue. An element that is
-- run by runners is leased by one of them, and has no event before its end.
create function take_elements(head text, positions bigint[], indexes bigint[]) returns void language sql as $$
    insert into workload (
        id, tenant, name, labels, spec, reason, level, held_by, held_at, unheld_at, paused_s, submitted_at,
        submitted_by, array_id, array_index, runner)
    select h.id || '-' || coalesce(e.index::text, 'r' || e.position), h.tenant, h.name, h.labels,
           jsonb_set(h.spec, '{array}', (h.spec -> 'array') || jsonb_build_object(
               'throttle', null, 'ranges', case when e.index is null then '[]'
                   else jsonb_build_array(jsonb_build_array(e.index, e.index, 1)) end)),
           h.reason, h.level, h.held_by, h.held_at, h.unheld_at, h.paused_s,
           h.submitted_at + e.position * interval '1 microsecond', h.submitted_by, h.id, e.index,
           case when e.index is not null and a.runners is not null then '' end
    from workload as h join workload_array as a using (id), unnest(positions, indexes) as e (position, index)
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
