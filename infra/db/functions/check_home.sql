create or replace function check_home(wanted text) returns void language plpgsql as $$
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
