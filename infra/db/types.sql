-- The composite types of the database, as they are now. `award_plans` uses all of them: for the candidates that it reads, the
-- rows that it locks, and the allocations that it writes.

-- What a candidate requests of one machine.
create type award_request as (machine text, gpus bigint, cpus_milli bigint, memory_bytes bigint);

-- A workload that a candidate evicts, and the attempt that the candidate's bid is about.
create type award_victim as (victim text, attempt bigint);

-- What a candidate gets on one machine. `held` and `awaited` are masks of slots; `cpus_milli` and `memory_bytes` include what
-- is awaited. `ready`: nothing is awaited from victims.
create type award_allocation as (
    machine text, held bigint, awaited bigint, cpus_milli bigint, awaited_cpus_milli bigint, memory_bytes bigint,
    awaited_memory_bytes bigint, ready boolean
);

-- A workload with its plan, as `activities.scheduling.awards` sends it. The last four fields are set by the check.
create type award_candidate as (
    workload text, rank bigint, region text, plan jsonb, gpu_types jsonb, cpus_milli bigint, detail jsonb,
    machines award_request[], victims award_victim[],
    reason jsonb,          -- Of its phase, if everything is held at once.
    waiting_reason jsonb,  -- Of its phase, if it waits for victims.
    tenant text, attempt bigint, ready boolean, allocations award_allocation[]
);

-- A locked workload. `queued`: it is in a queued phase, and no user holds it back.
create type award_workload as (tenant text, attempt bigint, queued boolean);

-- A locked machine. `free_slots` and `promised_slots` are masks; `free_slots` is null if the machine takes no work.
create type award_machine as (
    free_slots bigint, promised_slots bigint, free_cpus_milli bigint, free_memory_bytes bigint
);
