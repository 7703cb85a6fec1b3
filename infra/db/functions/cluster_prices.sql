-- Records the history of a cluster's prices and capacity kind: one row from each change on.
create function record_cluster_price() returns trigger language plpgsql as $$
begin
    if tg_op = 'INSERT' then
        insert into cluster_price (region, cluster, since, capacity, prices)
        values (new.region, new.name, '-infinity', new.capacity, '{}') on conflict do nothing;
        if found and new.prices = '{}' then
            return null;
        end if;
    end if;
    insert into cluster_price (region, cluster, since, capacity, prices)
    values (new.region, new.name, clock_timestamp(), new.capacity, new.prices)
    on conflict (region, cluster, since) do update set capacity = excluded.capacity, prices = excluded.prices;
    return null;
end $$;
create trigger cluster_inserted after insert on cluster for each row execute function record_cluster_price();
create trigger cluster_has_other_prices after update of capacity, prices on cluster for each row
    when ((old.capacity, old.prices) is distinct from (new.capacity, new.prices))
    execute function record_cluster_price();
