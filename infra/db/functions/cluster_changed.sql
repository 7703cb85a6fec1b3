-- Logs a change of a cluster. Schedulers store the cluster's attributes with each of its machines.
create or replace function cluster_changed() returns trigger language plpgsql as $$
begin
    insert into change (kind, key, region)
    select 'machine', id, region from machine where region = new.region and cluster = new.name;
    return null;
end $$;
