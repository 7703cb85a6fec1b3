-- How stale replicas are (MAST 3.5), kept whoever writes: `stale_since` is when the first partition was appended that a
-- replica of a whole table lacks, if it has been complete once; null where it lacks none, as the home.

create function replica_is_ready() returns trigger language plpgsql as $$
begin
    new.ready_at := clock_timestamp();
    return new;
end $$;

create trigger replica_is_ready before insert or update of state on replica
    for each row when (new.state = 'ready' and new.ready_at is null) execute function replica_is_ready();

-- Appends to a table come one after another, by the lock that each takes of its row.
create function replicas_lack_what_came() returns trigger language plpgsql as $$
begin
    update replica as r set stale_since = came.at
    from (select data_table, min(created_at) as at from moved_rows group by data_table) as came
        join data_table as t on t.name = came.data_table
    where r.data_table = came.data_table and r.region <> t.home_region and r.whole and r.state <> 'copying'
        and r.ready_at is not null and r.stale_since is null;
    return null;
end $$;

create trigger replicas_lack_what_came after insert on data_partition referencing new table as moved_rows
    for each statement execute function replicas_lack_what_came();

create function replica_partition_changed() returns trigger language plpgsql as $$
declare
    held replica_partition := case when tg_op = 'DELETE' then old else new end;
    came boolean := tg_op <> 'DELETE' and held.ready_at is not null;
    own replica;
    since timestamptz;
begin
    -- Most are a home's, or of a replica that has been nobody's yet: nothing is locked for them.
    if came and not exists (
        select from replica where data_table = held.data_table and region = held.region and stale_since is not null)
    then
        return null;
    end if;
    -- Locked before it is looked what is lacking: an append that has not locked it yet comes later, and adds its own.
    select * into own from replica as r
    where r.data_table = held.data_table and r.region = held.region and r.whole and r.state <> 'copying'
        and r.ready_at is not null
    for no key update;
    if not found then
        return null;
    end if;
    if came then
        select min(p.created_at) into since from data_partition as p
        where p.data_table = held.data_table and not exists (
            select from replica_partition as h
            where h.data_table = p.data_table and h.partition = p.name and h.region = held.region
                and h.ready_at is not null);
    else
        select least(own.stale_since, p.created_at) into since from data_partition as p
        where p.data_table = held.data_table and p.name = held.partition;
    end if;
    update replica as r set stale_since = since, topping_up = r.topping_up and since is not null
    where r.data_table = held.data_table and r.region = held.region and r.stale_since is distinct from since;
    return null;
end $$;

create trigger replica_partition_came after insert on replica_partition
    for each row when (new.ready_at is not null) execute function replica_partition_changed();
create trigger replica_partition_changed after update on replica_partition
    for each row when (new.ready_at is distinct from old.ready_at) execute function replica_partition_changed();
create trigger replica_partition_went after delete on replica_partition
    for each row when (old.ready_at is not null) execute function replica_partition_changed();
