create or replace function replica_partition_changed() returns trigger language plpgsql as $$
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
