-- What the columns of tables use: computed values and defaults. This file is executed before the tables are created.

-- Returns the part of a specification that schedulers read, as one text. Workloads with the same demand have the same
-- text, and most workloads in a queue share theirs. `domain.demand` parses it.
create function workload_ask(spec jsonb) returns text language sql immutable parallel safe as $$
    select jsonb_strip_nulls(jsonb_build_object(
        'jobs', (
            select jsonb_agg(jsonb_build_array(
                job -> 'name', job -> 'tasks', job -> 'resources' -> 'gpus', job -> 'resources' -> 'gpu_types',
                job -> 'resources' -> 'cpus_milli', job -> 'resources' -> 'memory_bytes',
                coalesce(job -> 'span_clusters', 'false')) || case when job ->> 'most_tasks' is not null
                    then jsonb_build_array(coalesce(nullif(job -> 'topology', 'null'), '{}'), job -> 'most_tasks')
                    when jsonb_typeof(job -> 'topology') = 'object' then jsonb_build_array(job -> 'topology')
                    else '[]' end order by place)
            from jsonb_array_elements(spec -> 'jobs') with ordinality as listed (job, place)),
        'tables', nullif(spec -> 'tables', '[]'),
        'allowed', spec -> 'regions_allowed',
        'excluded', nullif(spec -> 'regions_excluded', '[]'),
        'capacity', case when spec ->> 'cluster' is not null then jsonb_build_array('cluster:' || (spec ->> 'cluster'))
            when spec -> 'capacity' ? 'own' then (
                select jsonb_agg(case kind when 'own' then 'tenant:' || (spec ->> 'tenant') else kind end
                    order by place)
                from jsonb_array_elements_text(spec -> 'capacity') with ordinality as listed (kind, place))
            else spec -> 'capacity' end,
        'max_runtime_s', spec -> 'limits' -> 'max_runtime_s',
        'isolation', spec -> 'isolation',
        'spread', spec -> 'spread',
        'has_image', nullif(jsonb_path_exists(spec, '$.jobs[*] ? (@.image != null)'), false)))::text
$$;

-- Returns the namespace of a table: the part of its name before the first dot, or `default`.
create function table_namespace(name text) returns text language sql immutable parallel safe as $$
    select case when strpos(name, '.') > 0 then split_part(name, '.', 1) else 'default' end
$$;

-- The number of changes by users that affect decisions about evictions. An award compares it with that of its bids.
create sequence outside_change;

create function newest_outside_change() returns bigint language sql stable as $$
    select last_value from outside_change
$$;
