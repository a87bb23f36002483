/* Graphs: operations that are recorded once and submitted as one. */

#include "cuda_stub.h"

int live_graphs;
Graph *graphs;

static void come(Graph *graph) {
    live_graphs++;
    graph->next = graphs;
    graphs = graph;
}
static void go(Graph *graph) {
    Graph **at = &graphs;
    while (*at != graph) at = &(*at)->next;
    *at = graph->next;
    live_graphs--;
}

void graph_unreference(Graph *graph) {
    if (--graph->references) return;
    while (graph->first) {
        Operation *o = graph->first;
        graph->first = o->next;
        free(o);
    }
    free(graph);
}

CUresult cuStreamBeginCapture_v2(Stream *s, int mode) {
    ENTER(mode >= 0 && mode <= 2) {
        if ((result = usable(s)) != OK) {}
        else if (s->capture) result = CAPTURE_UNSUPPORTED;
        else {
            s->capture = calloc(1, sizeof *s->capture);
            s->capture->alive = s->capture->references = 1;
            s->is_origin = 1;
            s->capturing_thread = pthread_self();
            come(s->capture);
        }
    }
    LEAVE;
}
CUresult cuStreamEndCapture(Stream *s, Graph **out) {
    ENTER(out) {
        if ((result = usable(s)) == OK && (!s->capture || !s->is_origin)) result = CAPTURE_INVALIDATED;
        if (result == OK) {
            Graph *graph = s->capture;
            for (int i = 0; i < MAX_STREAMS; i++)
                if (slots[i] && slots[i]->capture == graph) slots[i]->capture = NULL;
            s->is_origin = 0;
            *out = graph;
            if (graph->invalid) {
                result = CAPTURE_INVALIDATED, *out = NULL;
                go(graph);
                graph_unreference(graph);
            }
        }
    }
    LEAVE;
}
CUresult cuGraphInstantiateWithFlags(Graph **out, Graph *source, unsigned long long flags) {
    (void)flags;
    ENTER(out && source && source->alive) {
        Graph *graph = calloc(1, sizeof *graph);
        graph->is_exec = graph->alive = graph->references = 1;
        for (Operation *o = source->first; o; o = o->next) {
            Operation *copy = malloc(sizeof *copy);
            *copy = *o;
            copy->next = NULL;
            append(&graph->first, &graph->last, copy);
        }
        come(graph);
        *out = graph;
    }
    LEAVE;
}
CUresult cuGraphLaunch(Graph *graph, Stream *s) {
    ENTER(graph && graph->alive && graph->is_exec) {
        if ((result = usable(s)) == OK) {
            Operation *o = operation(GRAPH);
            o->graph = graph;
            graph->references++;
            submit(s, o);
        }
    }
    LEAVE;
}
static CUresult destroy_graph(Graph *graph) {
    graph->alive = 0;
    go(graph);
    graph_unreference(graph);
    return OK;
}
CUresult cuGraphExecDestroy(Graph *graph) {
    ENTER(graph && graph->alive) result = destroy_graph(graph);
    LEAVE;
}
CUresult cuGraphDestroy(Graph *graph) {
    ENTER(graph && graph->alive) result = destroy_graph(graph);
    LEAVE;
}
