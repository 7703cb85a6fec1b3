-- Schedulers hold what a cluster's machines share with each machine.
create or replace function cluster_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, region)
    select 'machine', id, region from machine where region = new.region and cluster = new.name;
    return null;
end $$;
