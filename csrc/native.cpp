// What Python sees of the native core.
#include "bind.h"

NB_MODULE(_native, m) {
    m.doc() = "Native core of motet.balance: balances items over ranks.";
    motet::bind_phase(m);
    motet::bind_split(m);
    motet::bind_joint(m);
}
