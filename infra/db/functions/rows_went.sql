-- Logs deleted rows. A released attempt only counts in its tenant's usage window, which is then summed up again.
create or replace function rows_went() returns trigger language plpgsql as $$
begin
    case tg_table_name
        when 'workload' then
            insert into change (kind, key) select 'moved', id from moved_rows;
        when 'attempt' then
            insert into change (kind, key, attempt, region)
            select case when released_at is null then 'attempt' else 'history' end, workload, attempt, region
            from moved_rows;
        when 'allocation' then
            insert into change (kind, key, attempt)
            select distinct 'attempt', workload, attempt from moved_rows where released_at is null;
        when 'machine' then
            insert into change (kind, key, region) select 'machine', id, region from moved_rows;
    end case;
    return null;
end $$;
