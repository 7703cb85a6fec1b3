-- What the database keeps of the catalogue, whoever writes it: a table has one home, whose replica is whole, ready and
-- has every partition; a partition never changes, and goes only with its table.

create function table_namespace(name text) returns text language sql immutable parallel safe as $$
    select case when strpos(name, '.') > 0 then split_part(name, '.', 1) else 'default' end
$$;

-- The lock puts appends to a table in one order with each other and with changes of its home: times follow commits.
create function data_partition_comes() returns trigger language plpgsql as $$
begin
    perform from data_table where name = new.data_table for no key update;
    new.created_at := clock_timestamp();
    return new;
end $$;

create function data_partitions_came() returns trigger language plpgsql as $$
begin
    update data_table as t set size_bytes = t.size_bytes + came.size_bytes
    from (select data_table, sum(size_bytes) as size_bytes from moved_rows group by data_table) as came
    where t.name = came.data_table;
    insert into replica_partition (data_table, partition, region, ready_at)
    select p.data_table, p.name, t.home_region, p.created_at
    from moved_rows as p join data_table as t on t.name = p.data_table
        join replica as r on r.data_table = t.name and r.region = t.home_region and r.state = 'ready' and r.whole;
    return null;
end $$;

create function data_partition_stays() returns trigger language plpgsql as $$
begin
    if tg_op = 'UPDATE' then
        raise exception 'partition % of table % never changes', old.name, old.data_table
            using errcode = 'check_violation', constraint = 'data_partition_stays';
    end if;
    if exists (select from data_table where name = old.data_table) then
        raise exception 'partition % of table % goes only with its table', old.name, old.data_table
            using errcode = 'check_violation', constraint = 'data_partition_stays';
    end if;
    return null;
end $$;

-- Whoever makes a copy of a whole table ready has copied all that there is.
create function replica_became_ready() returns trigger language plpgsql as $$
begin
    perform from data_table where name = new.data_table for share;
    insert into replica_partition (data_table, partition, region, ready_at)
    select p.data_table, p.name, new.region, clock_timestamp() from data_partition as p where p.data_table = new.data_table
    on conflict (data_table, partition, region) do update set ready_at = excluded.ready_at
        where replica_partition.ready_at is null;
    return null;
end $$;

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

create function data_table_has_home() returns trigger language plpgsql as $$
begin
    perform check_home(new.name);
    return null;
end $$;

-- Of a replica that is not the home's anything may change: looked at first, since a whole replica goes row by row.
create function home_replica_stays() returns trigger language plpgsql as $$
begin
    perform from data_table where name = old.data_table and home_region = old.region for share;
    if found then
        perform check_home(old.data_table);
    end if;
    return null;
end $$;

create trigger data_partition_comes before insert on data_partition
    for each row execute function data_partition_comes();
create trigger data_partitions_came after insert on data_partition referencing new table as moved_rows
    for each statement execute function data_partitions_came();
create trigger data_partition_unchanged before update on data_partition
    for each row execute function data_partition_stays();
create constraint trigger data_partition_stays after delete on data_partition
    deferrable initially deferred for each row execute function data_partition_stays();

create trigger replica_came_ready after insert on replica
    for each row when (new.state = 'ready' and new.whole) execute function replica_became_ready();
create trigger replica_became_ready after update of state, whole on replica
    for each row when (new.state = 'ready' and new.whole and (old.state = 'copying' or not old.whole))
    execute function replica_became_ready();

create constraint trigger data_table_came after insert on data_table
    deferrable initially deferred for each row execute function data_table_has_home();
create constraint trigger data_table_moved after update of home_region on data_table
    deferrable initially deferred for each row execute function data_table_has_home();
create constraint trigger home_replica_changed after update of state, whole, region, data_table or delete on replica
    deferrable initially deferred for each row when (old.state = 'ready' and old.whole)
    execute function home_replica_stays();
create constraint trigger home_partition_changed after update or delete on replica_partition
    deferrable initially deferred for each row when (old.ready_at is not null) execute function home_replica_stays();
