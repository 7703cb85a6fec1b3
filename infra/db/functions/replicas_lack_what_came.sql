-- Marks replicas as stale after an append. Appends to a table are serialised by the lock on the table's row.
create or replace function replicas_lack_what_came() returns trigger language plpgsql as $$
begin
    
    perform from replica as r where r.data_table in (select data_table from moved_rows) and r.stale_since is not null
    order by r.data_table, r.region for no key update;

    update replica as r set stale_since = came.at
    from (select data_table, min(created_at) as at from moved_rows group by data_table) as came
        join data_table as t on t.name = came.data_table
    where r.data_table = came.data_table and r.region <> t.home_region and r.whole and r.state <> 'copying'
        and r.ready_at is not null and r.stale_since is null;
    return null;
end $$;
