-- The allocation guard. It updates each machine's slot masks and free counts from the rows of `allocation`, and rejects
-- a second holder or a second successor of a slot, independently of the application code.
create function guard_allocation() returns trigger language plpgsql as $$
declare
    old_live boolean := tg_op <> 'INSERT' and old.released_at is null;
    new_live boolean := tg_op <> 'DELETE' and new.released_at is null;
    old_slots bigint := case when old_live then old.slots else 0 end;
    old_awaited bigint := case when old_live then old.awaited else 0 end;
    old_cpus bigint := case when old_live then old.cpus_milli - old.awaited_cpus_milli else 0 end;
    old_memory bigint := case when old_live then old.memory_bytes - old.awaited_memory_bytes else 0 end;
    new_slots bigint := case when new_live then new.slots else 0 end;
    new_awaited bigint := case when new_live then new.awaited else 0 end;
    new_cpus bigint := case when new_live then new.cpus_milli - new.awaited_cpus_milli else 0 end;
    new_memory bigint := case when new_live then new.memory_bytes - new.awaited_memory_bytes else 0 end;
begin
    if tg_op = 'UPDATE' and new.machine <> old.machine then
        raise exception 'an allocation cannot change its machine' using errcode = 'check_violation';
    end if;
    if not old_live and not new_live then
        return null;  -- History: the machine has no part in it, and its row need not be locked.
    end if;
    update machine
    set held = (held & ~old_slots) | new_slots,
        promised = (promised & ~old_awaited) | new_awaited,
        free_cpus_milli = free_cpus_milli + old_cpus - new_cpus,
        free_memory_bytes = free_memory_bytes + old_memory - new_memory
    where id = coalesce(new.machine, old.machine)
      and (held & ~old_slots) & new_slots = 0
      and (promised & ~old_awaited) & new_awaited = 0;
    if not found then
        raise exception 'machine %: slots % or promised slots % have a holder or a successor already',
            coalesce(new.machine, old.machine), new_slots, new_awaited using errcode = 'exclusion_violation';
    end if;
    return null;
end $$;
create trigger allocation_guard after update or delete on allocation for each row execute function guard_allocation();

-- The allocation guard for inserts. Like `guard_allocation`, but for all inserted rows of a statement at once.
create function guard_inserted_allocations() returns trigger language plpgsql as $$
declare
    refused text;
begin
    with taken as (
        select machine, bit_or(slots) as slots, bit_or(awaited) as awaited, sum(slots) as slots_sum,
               sum(awaited) as awaited_sum, sum(cpus_milli - awaited_cpus_milli) as cpus,
               sum(memory_bytes - awaited_memory_bytes) as memory
        from inserted where released_at is null group by machine
    ), taking as (
        update machine
        set held = held | taken.slots, promised = promised | taken.awaited,
            free_cpus_milli = free_cpus_milli - taken.cpus, free_memory_bytes = free_memory_bytes - taken.memory
        from taken
        where machine.id = taken.machine
          -- Masks that have no slot in common add up to their union.
          and taken.slots_sum = taken.slots and machine.held & taken.slots = 0
          and taken.awaited_sum = taken.awaited and machine.promised & taken.awaited = 0
        returning machine.id
    )
    select string_agg(taken.machine, ', ') into refused
    from taken where not exists (select from taking where taking.id = taken.machine);
    if refused is not null then
        raise exception 'machine %: slots or promised slots have a holder or a successor already', refused
            using errcode = 'exclusion_violation';
    end if;
    return null;
end $$;
create trigger allocation_guard_inserted after insert on allocation referencing new table as inserted
    for each statement execute function guard_inserted_allocations();

-- Only slots that have a holder can be promised. The trigger is deferred, because a handover violates this temporarily.
create function check_promised_slots() returns trigger language plpgsql as $$
begin
    if exists (select from machine where id = new.id and promised & ~held <> 0) then
        raise exception 'machine %: a promised slot has no holder', new.id using errcode = 'check_violation';
    end if;
    return null;
end $$;
create constraint trigger promised_slots after insert or update on machine deferrable initially deferred
    for each row when (new.promised & ~new.held <> 0) execute function check_promised_slots();
