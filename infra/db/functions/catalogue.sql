-- The catalogue: partitions are only appended, a table's home is complete, and its other replicas know what they lack.

-- Raises an error unless the home of a table has a ready replica with all of its partitions.
create function check_home(wanted text) returns void language plpgsql as $$
declare
    home text;
    lacking text;
begin
    -- The lock lets no one change the home, or append, between this and the commit.
    select home_region into home from data_table where name = wanted for share;
    if not found then
        return;
    end if;
    if not exists (select from replica where data_table = wanted and region = home and state = 'ready' and whole) then
        raise exception 'table %: its home % has no ready replica of the whole table', wanted, home
            using errcode = 'check_violation', constraint = 'home_is_complete';
    end if;
    select p.name into lacking from data_partition as p
    where p.data_table = wanted and not exists (
        select from replica_partition as h
        where h.data_table = wanted and h.partition = p.name and h.region = home and h.ready_at is not null)
    limit 1;
    if found then
        raise exception 'table %: its home % lacks partition %', wanted, home, lacking
            using errcode = 'check_violation', constraint = 'home_is_complete';
    end if;
end $$;

create function check_table_home() returns trigger language plpgsql as $$
begin
    perform check_home(new.name);
    return null;
end $$;
create constraint trigger data_table_inserted after insert on data_table deferrable initially deferred
    for each row execute function check_table_home();
create constraint trigger data_table_moved after update of home_region on data_table deferrable initially deferred
    for each row execute function check_table_home();

-- Only the replica in the table's home is checked; other replicas may change freely. The home is read first, because
-- this runs for each row when a whole replica is deleted.
create function forbid_home_replica_change() returns trigger language plpgsql as $$
begin
    perform from data_table where name = old.data_table and home_region = old.region for share;
    if found then
        perform check_home(old.data_table);
    end if;
    return null;
end $$;
create constraint trigger home_replica_changed after update of state, whole, region, data_table or delete on replica
    deferrable initially deferred for each row when (old.state = 'ready' and old.whole)
    execute function forbid_home_replica_change();
create constraint trigger home_partition_changed
    after update of data_table, partition, region, ready_at or delete on replica_partition
    deferrable initially deferred for each row when (old.ready_at is not null)
    execute function forbid_home_replica_change();

-- The lock serialises appends to a table with each other and with changes of its home, so that the order of the times
-- is the order of the commits.
create function set_partition_created_at() returns trigger language plpgsql as $$
begin
    perform from data_table where name = new.data_table for no key update;
    new.created_at := clock_timestamp();
    return new;
end $$;
create trigger partition_created_at before insert on data_partition
    for each row execute function set_partition_created_at();

-- Adds the sizes of new partitions to their tables. The replica in the home has them from the start.
create function apply_new_partitions() returns trigger language plpgsql as $$
begin
    update data_table as t set size_bytes = t.size_bytes + added.size_bytes
    from (select data_table, sum(size_bytes) as size_bytes from inserted group by data_table) as added
    where t.name = added.data_table;
    insert into replica_partition (data_table, partition, region, ready_at)
    select p.data_table, p.name, t.home_region, p.created_at
    from inserted as p join data_table as t on t.name = p.data_table
        join replica as r on r.data_table = t.name and r.region = t.home_region and r.state = 'ready' and r.whole;
    return null;
end $$;
create trigger partitions_inserted after insert on data_partition referencing new table as inserted
    for each statement execute function apply_new_partitions();

create function forbid_partition_change() returns trigger language plpgsql as $$
begin
    if tg_op = 'UPDATE' then
        raise exception 'partition % of table % never changes', old.name, old.data_table
            using errcode = 'check_violation', constraint = 'forbid_partition_change';
    end if;
    if exists (select from data_table where name = old.data_table) then
        raise exception 'partition % of table % goes only with its table', old.name, old.data_table
            using errcode = 'check_violation', constraint = 'forbid_partition_change';
    end if;
    return null;
end $$;
create trigger partition_updated before update on data_partition
    for each row execute function forbid_partition_change();
create constraint trigger partition_deleted after delete on data_partition deferrable initially deferred
    for each row execute function forbid_partition_change();

create function forbid_manifest_change() returns trigger language plpgsql as $$
begin
    raise exception 'the manifest of partition % of table % is complete and never changes',
        old.partition, old.data_table
        using errcode = 'check_violation', constraint = 'forbid_manifest_change';
end $$;
create trigger manifest_updated before update on partition_manifest for each row when (old.checksummed_at is not null)
    execute function forbid_manifest_change();

-- Sets the time at which a replica becomes ready.
create function set_replica_ready_at() returns trigger language plpgsql as $$
begin
    new.ready_at := clock_timestamp();
    return new;
end $$;
create trigger replica_ready_at before insert or update of state on replica for each row
    when (new.state = 'ready' and new.ready_at is null) execute function set_replica_ready_at();

-- A replica of a whole table that becomes ready must have every partition that the table has at that time.
create function complete_replica() returns trigger language plpgsql as $$
begin
    perform from data_table where name = new.data_table for share;
    insert into replica_partition (data_table, partition, region, ready_at)
    select p.data_table, p.name, new.region, clock_timestamp() from data_partition as p
    where p.data_table = new.data_table
    on conflict (data_table, partition, region) do update set ready_at = excluded.ready_at
        where replica_partition.ready_at is null;
    return null;
end $$;
create trigger replica_inserted_ready after insert on replica for each row
    when (new.state = 'ready' and new.whole) execute function complete_replica();
create trigger replica_became_ready after update of state, whole on replica for each row
    when (new.state = 'ready' and new.whole and (old.state = 'copying' or not old.whole))
    execute function complete_replica();

-- Marks replicas as stale after an append. Appends to a table are serialised by the lock on the table's row.
create function mark_replicas_stale() returns trigger language plpgsql as $$
begin
    perform from replica as r where r.data_table in (select data_table from inserted) and r.stale_since is not null
    order by r.data_table, r.region for no key update;

    update replica as r set stale_since = added.at
    from (select data_table, min(created_at) as at from inserted group by data_table) as added
        join data_table as t on t.name = added.data_table
    where r.data_table = added.data_table and r.region <> t.home_region and r.whole and r.state <> 'copying'
        and r.ready_at is not null and r.stale_since is null;
    return null;
end $$;
create trigger partitions_make_stale after insert on data_partition referencing new table as inserted
    for each statement execute function mark_replicas_stale();

create function update_replica_staleness() returns trigger language plpgsql as $$
declare
    held replica_partition := case when tg_op = 'DELETE' then old else new end;
    came boolean := tg_op <> 'DELETE' and held.ready_at is not null;
    own replica;
    since timestamptz;
begin
    -- Partitions that arrive usually belong to a replica that is not stale. For these, no row is locked.
    if came and not exists (
        select from replica where data_table = held.data_table and region = held.region and stale_since is not null)
    then
        return null;
    end if;
    -- Lock the replica before reading what it lacks: an append that takes the lock later updates `stale_since` itself.
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
create trigger replica_partition_inserted after insert on replica_partition for each row
    when (new.ready_at is not null) execute function update_replica_staleness();
create trigger replica_partition_changed after update on replica_partition for each row
    when (new.ready_at is distinct from old.ready_at) execute function update_replica_staleness();
create trigger replica_partition_deleted after delete on replica_partition for each row
    when (old.ready_at is not null) execute function update_replica_staleness();
