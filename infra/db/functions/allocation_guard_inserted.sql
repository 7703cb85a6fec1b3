-- The allocation guard for inserts. Like `allocation_guard`, but for all inserted rows of a statement at once.
create or replace function allocation_guard_inserted() returns trigger language plpgsql as $$
declare
    refused text;
begin
    with taken as (
        select machine, bit_or(slots) as slots, bit_or(awaited) as awaited, sum(slots) as slots_sum,
               sum(awaited) as awaited_sum, sum(cpus_milli - awaited_cpus_milli) as cpus,
               sum(memory_bytes - awaited_memory_bytes) as memory
        from moved_rows where released_at is null group by machine
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
