-- The allocation guard. It updates each machine's slot masks and free counts from the rows of `allocation`, and rejects
-- a second holder or a second successor of a slot, independently of the application code.
create or replace function allocation_guard() returns trigger language plpgsql as $$
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
