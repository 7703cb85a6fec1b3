-- The rows of `bench.console_rows`, in sections. `named` makes the workloads of a section, and runs before each after it.

-- places
insert into tenant (name, level, quota_gpus, quota_cpus_milli)
select key, value::int, jsonb_build_object('h100', cast(:machines as int), 'a100', cast(:machines as int)), null
from jsonb_each_text(cast(:tenants as jsonb)) on conflict do nothing;
insert into region (name, bucket_url, storage_bytes)
select name, 'file:///nowhere/' || name, 1000000000000000 from unnest(cast(:regions as text[])) as name;
insert into cluster (region, name, zone, capacity, prices)
select r, r || '-' || c, r || '-' || c, case c when 1 then 'reserved' when 2 then 'spot' else 'voluntary' end,
       case c when 1 then '{"h100": 3.2, "a100": 1.9, "cpu": 0.03}' when 2 then '{"h100": 1.1, "a100": 0.7}' else '{}' end::jsonb
from unnest(cast(:regions as text[])) as r, generate_series(1, 4) as c;
insert into machine (id, region, cluster, rack, gpu_type, gpus, cpus_milli, memory_bytes, free_cpus_milli,
                     free_memory_bytes, state, incarnation, public_key, address, cordon, isolation, lost_at, draining)
select format('%s/%s-%s/m-%s', r, r, c, lpad(n::text, 5, '0')), r, r || '-' || c, 'rack-' || n / 32,
       case when c % 2 = 1 then 'h100' else 'a100' end, 8, 96000, 1099511627776, 96000, 1099511627776,
       case when n % 211 = 17 then 'lost' else 'ready' end, 'i', '', '127.0.0.1',
       case when n % 97 = 5 then cast(:cordon as jsonb) end,
       'sandbox', case when n % 211 = 17 then now() - interval '3 minutes' end, false
from (select n, (cast(:regions as text[]))[1 + n % 3] as r, 1 + (n / 3) % 4 as c
      from generate_series(0, cast(:machines as bigint) - 1) as n) as m;
insert into machine_change (machine, since, state, is_closed)
select id, now() - interval '30 days', 'ready', false from machine
union all select id, now() - interval '3 minutes', state, cordon is not null from machine
where state = 'lost' or cordon is not null;

-- named
create temporary table named on commit drop as
select *, jsonb_build_object('name', name, 'tenant', tenant, 'jobs', jsonb_build_array(jsonb_build_object(
    'name', 'trainer', 'role', 'trainer', 'tasks', tasks, 'argv', jsonb_build_array('python', 'train.py'),
    'resources', jsonb_build_object('gpus', 8, 'gpu_types', jsonb_build_array('h100', 'a100'), 'cpus_milli', 32000, 'memory_bytes', 68719476736)))) as spec
from (select n, 'wl-' || lpad((cast(:first as bigint) + n)::text, 16, '0') as id, (cast(:names as text[]))[1 + n % 5] as tenant,
           (array['resnet','bert','whisper','pose','weather','ranker','diffusion','tabular','rerank','depth'])[1 + n % 10] || '-' || n / 10 as name, (cast(:names as text[]))[1 + n % 5] as team, 1 + n % 4 as tasks
    from generate_series(0, cast(:count as bigint) - 1) as n) as w;
create index on named (id);
analyze named;

-- ended
insert into workload (id, tenant, name, labels, spec, phase, reason, attempt, submitted_at, finished_at, region)
select id, tenant, name, jsonb_build_object('team', team, 'sweep', 's' || n / 100), spec,
       case when n % 20 = 3 then 'failed' when n % 20 = 7 then 'cancelled' else 'succeeded' end,
       case when n % 20 = 3 then cast(:failed as jsonb) end,
       1, at - interval '2 hours', at, null
from (select n, id, tenant, name, team, spec, now() - interval '1 minute' - cast(:days as float8) * interval '1 day' * (cast(:count as bigint) - n) / cast(:count as bigint) as at from named as w) as w;
insert into attempt (workload, attempt, region, plan, awarded_at, ready_at, started_at, released_at, outcome, lost_s,
                     gpu_types, cpus_milli, resumed_step, last_step, checkpoint_step, launch_limit_s, earned)
select w.id, 1, split_part(m.id, '/', 1),
       jsonb_build_object('jobs', jsonb_build_array(jsonb_build_object('job', 'trainer', 'gpu_type', m.gpu_type,
                          'machines', jsonb_build_array(jsonb_build_array(m.id, 1))))),
       w.submitted_at + interval '20 minutes', w.submitted_at + interval '20 minutes', w.submitted_at + interval '21 minutes',
       w.finished_at, case when n % 50 = 11 then cast(:preempted as jsonb) end,
       case when n % 50 = 11 then 60 + n % 600 end, jsonb_build_object(m.gpu_type, 8), 32000, 0, n % 90000, n % 90000,
       case when m.is_lent then 60 end, case when m.is_lent then jsonb_build_object('steps', '{}'::jsonb, 'checkpoint',
           jsonb_build_array(n % 90000, extract(epoch from w.finished_at - interval '5 minutes'))) end
from named as k join workload as w using (id)
     join (select id, gpu_type, cluster like '%-3' as is_lent, row_number() over (order by id) - 1 as number from machine) as m
     on m.number = k.n % cast(:machines as bigint);
insert into allocation (workload, attempt, machine, slots, awaited, cpus_milli, awaited_cpus_milli, memory_bytes,
                        awaited_memory_bytes, awarded_at, held_at, released_at, stopped_at)
select workload, 1, plan #>> '{jobs,0,machines,0,0}', 255, 0, 32000, 0, 68719476736, 0, awarded_at, ready_at, released_at, released_at
from attempt where released_at is not null;
insert into event (at, kind, tenant, workload, attempt, region, machine)
select a.awarded_at + s.at * (a.released_at - a.awarded_at), s.kind, w.tenant, w.id, 1, a.region, null
from attempt as a join workload as w on w.id = a.workload,
     (values ('workload.placing', 0.0), ('workload.running', 0.1), ('workload.succeeded', 1.0)) as s (kind, at)
where a.released_at is not null and a.released_at > now() - interval '3 days';
drop table named;

-- running
insert into workload (id, tenant, name, labels, spec, phase, reason, attempt, submitted_at, region)
select id, tenant, name, jsonb_build_object('team', team), spec,
       case when n % 17 = 4 then 'provisioning' when n % 29 = 6 then 'checkpointing' else 'running' end, null, 1,
       now() - interval '5 hours' - n % 400 * interval '1 minute', m.region
from named as w join (select region, row_number() over (order by id) - 1 as number from machine) as m on m.number = w.n;
insert into attempt (workload, attempt, region, plan, awarded_at, ready_at, started_at, gpu_types, cpus_milli, last_step,
                     checkpoint_step, checkpoint_at, cadence, launch_limit_s)
select w.id, 1, m.region, jsonb_build_object('jobs', jsonb_build_array(jsonb_build_object('job', 'trainer',
       'gpu_type', m.gpu_type, 'machines', jsonb_build_array(jsonb_build_array(m.id, 1))))),
       w.submitted_at + interval '30 minutes', w.submitted_at + interval '30 minutes', w.submitted_at + interval '32 minutes',
       jsonb_build_object(m.gpu_type, 8), 32000, 1000 + n * 37 % 90000, n * 37 % 90000, now() - n % 900 * interval '1 second', null,
       case when m.id like '%-3/%' then 60 end
from named as k join workload as w using (id)
     join (select id, region, gpu_type, row_number() over (order by id) - 1 as number from machine) as m on m.number = k.n;
insert into allocation (workload, attempt, machine, slots, awaited, cpus_milli, awaited_cpus_milli, memory_bytes,
                        awaited_memory_bytes, awarded_at, held_at)
select workload, 1, plan #>> '{jobs,0,machines,0,0}', (array[255, 255, 255, 15, 3])[1 + (hashtext(workload) & 3)], 0, 32000, 0,
       68719476736, 0, awarded_at, ready_at from attempt where released_at is null;
update machine as m set held = l.slots, free_cpus_milli = m.cpus_milli - 32000, free_memory_bytes = m.memory_bytes - 68719476736
from allocation as l where l.machine = m.id and l.released_at is null;
update machine set withheld = 240 where cluster like '%-3' and hashtext(id) % 7 = 0 and held & 240 = 0;
drop table named;

-- waiting
insert into workload (id, tenant, name, labels, spec, phase, submitted_at)
select id, tenant, name, jsonb_build_object('team', team), spec, 'pending', now() - (cast(:count as bigint) - n) * interval '1 second'
from named as w;
insert into waiting (workload, reasons)
select id, jsonb_build_object('reasons', cast(:why as jsonb))
from named as w;
drop table named;

-- replicas
insert into service_replica (service, number, version, workload, kind, zone, cluster, usd_per_h, is_base, ready, ready_changed_at, first_ready_at, address, port)
select :service, n, 1, 'wl-' || lpad((cast(:first as bigint) + n)::text, 16, '0'), case when n % 3 = 0 then 'on_demand' else 'spot' end,
       format('east-%s', 1 + n % 4), format('east-%s', 1 + n % 4), 1.1, n % 3 = 0, n % 7 <> 0, now(), now(), '127.0.0.1', 8000 + n
from generate_series(0, cast(:count as bigint) - 1) as n;
insert into service_requests (service, second, balancer, requests, failed, cut, p50_s, p99_s)
select :service, extract(epoch from now())::int - s, b, 40 + s % 20, s % 2, 0, 0.2, 1.5
from generate_series(1, 3700) as s, unnest(array['b1', 'b2']) as b;

-- wide
insert into region (name, bucket_url, storage_bytes) values ('wide', 'file:///nowhere/wide', 1000000000000000);
insert into cluster (region, name, zone, capacity, prices)
select 'wide', 'wide-' || name, 'wide-' || zone, capacity, prices from cluster where region <> 'wide';
insert into machine (id, region, cluster, rack, gpu_type, gpus, cpus_milli, memory_bytes, free_cpus_milli,
                     free_memory_bytes, held, withheld, state, incarnation, public_key, address, cordon, isolation, lost_at, draining)
select format('wide/wide-%s/%s', cluster, split_part(id, '/', 3)), 'wide', 'wide-' || cluster, rack, gpu_type, gpus, cpus_milli,
       memory_bytes, free_cpus_milli, free_memory_bytes, held, withheld, state, incarnation, public_key, address, cordon, isolation,
       lost_at, draining from machine where region <> 'wide';
insert into allocation (workload, attempt, machine, slots, awaited, cpus_milli, awaited_cpus_milli, memory_bytes,
                        awaited_memory_bytes, awarded_at, held_at)
select workload, attempt, format('wide/wide-%s/%s', split_part(machine, '/', 2), split_part(machine, '/', 3)), slots, awaited, cpus_milli,
       awaited_cpus_milli, memory_bytes, awaited_memory_bytes, awarded_at, held_at from allocation where released_at is null;
