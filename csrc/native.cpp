// What Python sees of the native core.
#include "bind.h"

NB_MODULE(_native, m) {
    m.doc() = "Native core of motet.balance: balances items over ranks.";
    motet::bind_packed(m);
    motet::bind_tokens(m);
    motet::bind_split(m);
    motet::bind_padded(m);
    motet::bind_grouping(m);
    motet::bind_reordering(m);
    motet::bind_home(m);
    motet::bind_nodes(m);
    motet::bind_joint(m);
}
