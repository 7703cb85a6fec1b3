-- The change log: which rows have changed that decisions look at. Only what a decision would notice is logged.
-- It is not crash-safe, and need not be: with it a crash empties `change_epoch`, and readers without an epoch read
-- everything (`infra.db.changes`).
--
-- Rows come and go in statements of many, and change one by one: so the triggers are by statement, and by row with a
-- condition that spares all changes that no decision looks at.
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
