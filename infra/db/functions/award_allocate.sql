-- What a candidate gets on one machine: it holds free resources at once, and awaits the rest from its victims. Null if that is
-- not enough, or if the machine takes no work.
create or replace function award_allocate(machine award_machine, requested award_request, victims award_victim[])
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
