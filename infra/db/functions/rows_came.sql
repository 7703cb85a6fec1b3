-- The change log: the changed rows that scheduling decisions depend on. Other changes are not logged.
-- The table is unlogged and need not be crash-safe: a crash also empties `change_epoch`, and readers without an epoch
-- read everything (`infra.db.changes`).
--
-- Inserts and deletes affect many rows per statement, and updates affect one. So the triggers for the former are per
-- statement, and those for updates are per row, with conditions that skip changes no decision depends on.
create or replace function rows_came() returns trigger language plpgsql as $$
begin
    case tg_table_name
        when 'workload' then
            insert into change (kind, key) select 'workload', id from moved_rows;
        when 'attempt' then
            insert into change (kind, key, attempt, region) select 'attempt', workload, attempt, region from moved_rows;
        when 'allocation' then
            insert into change (kind, key, attempt) select distinct 'attempt', workload, attempt from moved_rows;
        when 'machine' then
            insert into change (kind, key, region) select 'machine', id, region from moved_rows;
    end case;
    return null;
end $$;
