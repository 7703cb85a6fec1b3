-- Whether a candidate may evict all of its victims. Each victim must still have the attempt that the bid is about, must not be
-- evicted already, and must not be immune: a victim is immune if it evicted the candidate and the queue has not changed from
-- outside since.
--
-- `evicted` lists the victims of the candidates before. The caller has locked the candidate and the victims, so nothing that is
-- read here can change.
create or replace function award_victims_evictable(candidate text, victims award_victim[], evicted text[]) returns boolean
language plpgsql stable as $$
begin
    return not exists (
        select from unnest(victims) as v
        left join workload as w on w.id = v.victim and w.attempt = v.attempt
        left join attempt as a on a.workload = w.id and a.attempt = w.attempt
                              and a.released_at is null and a.evicting_since is null
        where a.workload is null
           or v.victim = any (evicted)
           or exists (
                select from eviction as e
                where e.evictor = v.victim and e.victim = candidate and e.change = newest_outside_change()));
end $$;
